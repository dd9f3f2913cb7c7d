# One command of a session: bash -c THIS bash STATE COMMAND MAX_CHARACTERS FIRST_DIRECTORY BASE
#
# BASE are the names of the variables that every command of the box starts with. STATE.0 and STATE.1
# hold bash code that brings back what the session had. They are written in turn when a command ends,
# on whatever way; the newer one that is whole counts, so a kill while writing costs nothing. No
# process is started. All names here begin with __burnish_, and only those are not kept.
__burnish_state=$1 __burnish_command=$2 __burnish_max=$3 __burnish_first=$4 __burnish_base=$5
__burnish_pid=$BASHPID __burnish_dir= __burnish_old= __burnish_user_trap= __burnish_age=0 __burnish_slot=1
builtin set --
builtin shopt -s expand_aliases

__burnish_options() { :; }

__burnish_status() { builtin return "$1"; }

# Says whether bash keeps a variable itself.
__burnish_own() {
    case $1 in
        __burnish_* | BASH | BASHOPTS | BASHPID | BASH_* | COMP_* | DIRSTACK | EPOCH* | EUID) ;;
        FUNCNAME | GROUPS | HISTCMD | HOSTNAME | HOSTTYPE | LINENO | MACHTYPE | OLDPWD | OSTYPE) ;;
        PIPESTATUS | PPID | PWD | RANDOM | SECONDS | SHELLOPTS | SHLVL | SRANDOM | UID | _) ;;
        *) builtin return 1 ;;
    esac
}

# Prints the state: whether a function called `exit`, then positional parameters. Few writes: each is a system call.
__burnish_print() {
    local __burnish_name __burnish_vars=() __burnish_functions=() __burnish_lines=()
    local __burnish_shopts=() __burnish_inside=$1
    builtin shift
    builtin mapfile -t __burnish_names < "$__burnish_state.options"
    for __burnish_name in "${__burnish_names[@]}"; do
        # `set +o posix` would switch aliases off, so only what is not the default is kept.
        case $__burnish_name in
            shopt*) __burnish_shopts+=("$__burnish_name") ;;
            'set -o onecmd' | 'set -o noexec') ;;
            'set -o '* | 'set +o braceexpand' | 'set +o hashall' | 'set +o interactive-comments')
                __burnish_lines+=("$__burnish_name")
                ;;
        esac
    done
    builtin printf '%s\n' "# $((__burnish_age + 1))" "${__burnish_shopts[@]}"
    builtin mapfile -t __burnish_names < "$__burnish_state.names"
    for __burnish_name in "${__burnish_names[@]}"; do
        __burnish_own "$__burnish_name" || __burnish_vars+=("$__burnish_name")
    done
    ((${#__burnish_vars[@]} == 0)) || builtin declare -p "${__burnish_vars[@]}"
    IFS=' ' builtin read -r -a __burnish_names <<< "$__burnish_base"
    for __burnish_name in "${__burnish_names[@]}"; do
        [[ -v $__burnish_name ]] || builtin printf 'unset -v %s\n' "$__burnish_name"
    done
    builtin umask -p
    # Inside a function these are the function's own: then those of before stay.
    [[ -n $__burnish_inside ]] || __burnish_parameters=("$@")
    if ((${#__burnish_parameters[@]})); then
        builtin printf 'set --'
        builtin printf ' %q' "${__burnish_parameters[@]}"
        builtin printf '\n'
    fi
    builtin printf '__burnish_dir=%q __burnish_old=%q\n' "$PWD" "${OLDPWD-}"
    # Functions late, as they may have the names of commands that are used above; aliases later, as
    # they are expanded in the text of functions already.
    builtin mapfile -t __burnish_names < "$__burnish_state.functions"
    for __burnish_name in "${__burnish_names[@]}"; do
        case $__burnish_name in __burnish_* | trap) ;; *) __burnish_functions+=("$__burnish_name") ;; esac
    done
    ((${#__burnish_functions[@]} == 0)) || builtin declare -f "${__burnish_functions[@]}"
    builtin declare -Fx
    builtin alias -p
    builtin printf '%s\n' '__burnish_options() { :' "${__burnish_lines[@]}" '}' '# end'
}

# Reads a file into __burnish_text: one character more than may be kept, if there are so many.
__burnish_read() {
    __burnish_text=
    [[ -f $1 ]] && IFS= builtin read -r -N "$((__burnish_max + 1))" __burnish_text < "$1"
}

__burnish_save() {
    local __burnish_text __burnish_new=$__burnish_state.$((1 - __burnish_slot))
    builtin compgen -v >| "$__burnish_state.names"
    builtin compgen -A function >| "$__burnish_state.functions"
    __burnish_print "$@" >| "$__burnish_new"
    __burnish_read "$__burnish_new"
    if ((${#__burnish_text} > __burnish_max)); then
        builtin printf 'session: what it holds is more than %s characters: not kept\n' "$__burnish_max" >&3
        : >| "$__burnish_new"
    elif [[ $__burnish_text != *$'\n# end\n' ]]; then
        builtin printf 'session: what it holds could not be written: not kept\n' >&3
    fi
}

# Exit status, whether a function called `exit`, positional parameters. The options of the user must not bite here.
__burnish_end() {
    __burnish_code=$1
    builtin shift
    { builtin set +o; builtin shopt -p; } >| "$__burnish_state.options" || :
    builtin set +aefuvxC +o pipefail
    [[ ! -o posix ]] || builtin set +o posix
    __burnish_save "$@"
}

__burnish_hook() {
    builtin trap '{ __burnish_end "$?" "${FUNCNAME+1}" "$@"; } 3>&2 2>/dev/null
        __burnish_status "$__burnish_code"
        builtin eval "$__burnish_user_trap"
        builtin exit "$__burnish_code"' EXIT
}

# The user's own EXIT trap runs when the state has been written.
trap() {
    builtin trap "$@"
    local __burnish_result=$? __burnish_now
    if [[ $BASHPID == "$__burnish_pid" ]]; then
        __burnish_now=$(builtin trap -p EXIT)
        if [[ $__burnish_now != *__burnish_end* ]]; then
            builtin eval "set -- $__burnish_now"
            __burnish_user_trap=${3-}
            __burnish_hook
        fi
    fi
    builtin return "$__burnish_result"
}

__burnish_best=
for __burnish_try in 0 1; do
    __burnish_read "$__burnish_state.$__burnish_try"
    if [[ $__burnish_text == '# '[0-9]*$'\n'*$'\n# end\n' ]]; then
        __burnish_number=${__burnish_text%%$'\n'*}
        __burnish_number=${__burnish_number#'# '}
        if [[ $__burnish_number != *[!0-9]* ]] && ((__burnish_number > __burnish_age)); then
            __burnish_age=$__burnish_number __burnish_slot=$__burnish_try
            __burnish_best=$__burnish_text
        fi
    fi
done
__burnish_text=
builtin eval "$__burnish_best" 2>/dev/null
__burnish_best=
__burnish_parameters=("$@")
if ! builtin cd -- "${__burnish_dir:-$__burnish_first}" 2>/dev/null; then
    builtin printf 'session: %s is gone: back in %s\n' "$__burnish_dir" "$__burnish_first" >&2
    builtin cd -- "$__burnish_first"
fi
if [[ -n $__burnish_old ]]; then OLDPWD=$__burnish_old; else unset -v OLDPWD; fi
__burnish_hook
builtin eval "__burnish_options; $__burnish_command"
