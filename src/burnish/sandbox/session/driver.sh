# One command of a session: sh -c THIS sh STATE COMMAND MAX_BYTES FIRST_DIRECTORY BASE
#
# As driver.bash, in what POSIX has. Functions and positional parameters are not kept, as a POSIX
# shell cannot print them. After an EXIT trap of its own, a command that calls `exit` leaves the state
# as it was before.
__burnish_state=$1
__burnish_done=

__burnish_options() { :; }

__burnish_print() {
    __burnish_dir=$PWD __burnish_old=${OLDPWD-}
    set
    export -p
    readonly -p
    for __burnish_name in $__burnish_base; do
        eval "[ -n \"\${$__burnish_name+x}\" ]" || printf 'unset %s\n' "$__burnish_name"
    done
    alias | while IFS= read -r __burnish_line; do
        case $__burnish_line in
            [A-Za-z_]*=*) printf 'alias %s\n' "$(alias "${__burnish_line%%=*}")" ;;
        esac
    done
    printf 'umask '
    umask
    printf '__burnish_options() { :\n'
    for __burnish_name in a e f u v x C; do
        case $__burnish_flags in *$__burnish_name*) printf 'set -%s\n' "$__burnish_name" ;; esac
    done
    printf '}\n# end\n'
}

__burnish_save() {
    __burnish_print > "$__burnish_state.new"
    __burnish_bytes=$(command -p wc -c < "$__burnish_state.new")
    if [ "${__burnish_bytes:-0}" -gt "$__burnish_max" ]; then
        printf 'session: what it holds is more than %s bytes: not kept\n' "$__burnish_max" >&3
    elif [ "$(command -p tail -n 1 "$__burnish_state.new")" != '# end' ]; then
        printf 'session: what it holds could not be written: not kept\n' >&3
    else
        command -p mv -f -- "$__burnish_state.new" "$__burnish_state" \
            || printf 'session: what it holds could not be put in place: not kept\n' >&3
    fi
}

__burnish_end() {
    __burnish_code=$1 __burnish_flags=$-
    set +aefuvxC
    if [ -z "$__burnish_done" ]; then
        __burnish_done=1
        __burnish_ifs=$IFS
        IFS=' 
	'
        __burnish_save
    fi
}

if [ -f "$__burnish_state" ]; then
    . "$__burnish_state" 2>/dev/null
    [ -z "${__burnish_ifs+x}" ] || IFS=$__burnish_ifs
fi
__burnish_state=$1 __burnish_max=$3 __burnish_first=$4 __burnish_base=$5 __burnish_done=
if ! cd "${__burnish_dir:-$4}" 2>/dev/null; then
    printf 'session: %s is gone: back in %s\n' "${__burnish_dir-}" "$4" >&2
    cd "$4"
fi
[ -z "${__burnish_old-}" ] || OLDPWD=$__burnish_old
trap '{ __burnish_end "$?"; } 3>&2 2>/dev/null; exit "$__burnish_code"' EXIT
eval "shift 5; __burnish_options; $2"
{ __burnish_end "$?"; } 3>&2 2>/dev/null
exit "$__burnish_code"
