_spectrain() {
    # bash breaks words at = and :, which join here again; what it is given back follows the last break
    local word="${COMP_WORDS[COMP_CWORD]}" start="" found part glue=""
    local -a words=()
    for part in "${COMP_WORDS[@]:1:COMP_CWORD}"; do
        if [[ ${#words[@]} -gt 0 && ( -n $glue || $part == [=:] || $part == =* ) ]]; then
            words[${#words[@]}-1]+="$part"
        else
            words+=("$part")
        fi
        [[ $part == [=:] ]] && glue=1 || glue=""
    done
    [[ $word == [=:] ]] && word=""
    [[ ${#words[@]} -gt 0 ]] && start="${words[${#words[@]}-1]}" && start="${start%"$word"}"
    COMPREPLY=()
    while IFS= read -r found; do
        found="${found#"$start"}" part="${found% }"
        COMPREPLY+=("${part// /\\ }${found:${#part}}")
    done < <("${COMP_WORDS[0]}" completion words -- "${words[@]}" 2>/dev/null)
}
complete -o nospace -F _spectrain spectrain
