_spectrain() {
    local -a found
    found=("${(@f)$("$words[1]" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -S '' -- ${(M)found:#*[^ ]}
    compadd -S ' ' -- ${${(M)found:#* }% }
}
compdef _spectrain spectrain
