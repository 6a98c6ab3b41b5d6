function _spectrain
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion words -- $words[2..-1] 2>/dev/null | string trim --right
end
complete -c spectrain -f -a '(_spectrain)'
