#!/bin/sh
# Process 1 of the virtual machine that run.sh starts: mounts what systemd would, makes the control
# groups that systemd would, runs the suites as each kind of user, and turns the machine off.
# run.sh has mounted the repository, which holds the plan, and /dev.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8

mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys
mkdir -p /dev/pts /dev/shm
mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup 2>/dev/null ||
    mount -t cgroup2 cgroup2 /sys/fs/cgroup
ip link set lo up 2>/dev/null || busybox ip link set lo up
ulimit -Hn 524288
dmesg -n 1 2>/dev/null
exec </dev/null
. /repo/plan.sh

say() { echo "VM $*"; }
say "kernel $(uname -r) $(uname -m), $(python3 --version)"

# As systemd does for those who log in (a session's scope) and for `systemd-run --user --scope`.
delegate() {
    for controller in cpu memory pids io; do
        echo "+$controller" >"$1/cgroup.subtree_control" 2>/dev/null
    done
}
groups=/sys/fs/cgroup
own() { chown "$1" "$2" "$2/cgroup.procs" "$2/cgroup.subtree_control" "$2/cgroup.threads"; }
mkdir -p $groups/user.slice/user-0.slice/session-1.scope $groups/user.slice/user-1000.slice/session-2.scope
mkdir -p $groups/system.slice
for folder in $groups $groups/user.slice $groups/system.slice; do delegate $folder; done
delegate $groups/user.slice/user-0.slice
manager=$groups/user.slice/user-1000.slice/user@1000.service
mkdir -p $manager/app.slice/run-1.scope
delegate $groups/user.slice/user-1000.slice
own 1000:1000 $manager
delegate $manager
own 1000:1000 $manager/app.slice
own 1000:1000 $manager/app.slice/run-1.scope

# where NAME COMMAND...: with the control group, user and ids of that kind of owner.
where() {
    kind=$1
    shift
    user="setpriv --reuid=1000 --regid=1000 --clear-groups --reset-env env PATH=/usr/bin:/bin LC_ALL=C.UTF-8"
    [ "$kind" = plain ] && : >/etc/subuid && : >/etc/subgid
    [ "$kind" = plain ] || echo "user:100000:65536" | tee /etc/subuid >/etc/subgid
    # Fresh ones each time: who has been in one has made room in it, and nobody can join it any more.
    case $kind in
    container | service) own_group=$(mktemp -d $groups/system.slice/$kind-XXXXXX) ;;
    esac
    [ "$kind" = service ] && own 1000:1000 $own_group
    case $kind in
    root) group=$groups/user.slice/user-0.slice/session-1.scope user="env" ;;
    container) group=$own_group user="unshare --cgroup --mount sh /tmp/contain.sh env" ;;
    scope) group=$manager/app.slice/run-1.scope ;;                # systemd-run --user --scope
    service) group=$own_group ;;                                 # a service with Delegate=yes
    session | plain) group=$groups/user.slice/user-1000.slice/session-2.scope ;; # a log-in
    *) say "unknown kind $kind" && return 1 ;;
    esac
    (
        sh -c "echo \$\$ >$group/cgroup.procs || exit 99; exec \"\$@\"" sh \
            $user PYTHONPATH=/repo/src:/opt/site PYTHONDONTWRITEBYTECODE=1 "$@"
    )
}

cat >/tmp/contain.sh <<'CONTAIN'
umount /sys/fs/cgroup && mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"
CONTAIN
marks="slow: .
gpu: ."
mkdir -p /tmp/results /home/user
chown 1000:1000 /tmp/results
for kind in $KINDS; do
    say "as $kind: probe"
    where "$kind" sh -c 'cat /proc/self/cgroup; cd /tmp; . /repo/command.sh' 2>&1
    echo "probe $? $kind" >>/tmp/results/codes
    for suite in $SUITES; do
        say "as $kind: $suite"
        name="$kind-$(basename "$suite" .py)"
        : >/tmp/results/$name.log
        # Emulation makes limits of seconds bite that do not elsewhere, most while the host is busy:
        # what fails is tried again by itself, and only what always fails counts.
        for attempt in 1 2 3; do
            again=$([ $attempt = 1 ] || echo --last-failed --last-failed-no-failures=none)
            {
                where "$kind" sh -c 'cd /tmp && exec "$@"' sh timeout "$SUITE_S" python3 -m pytest -q $again \
                    -c /dev/null --import-mode=importlib --rootdir /repo/tests -o "cache_dir=/tmp/cache-$name" \
                    -o pythonpath=/repo/tests/support -o "markers=$marks" \
                    --basetemp="/tmp/pytest-$kind" -ra --tb=short --durations=3 -m "not slow and not gpu" \
                    -k "$SELECT" "/repo/tests/$suite"
                echo $? >/tmp/code
            } 2>&1 | tee -a "/tmp/results/$name.log"
            code=$(cat /tmp/code)
            [ "$code" = 1 ] || break
        done
        # 5: nothing of this suite was selected.
        [ "$code" = 5 ] && code=0
        echo "$suite $code $kind" >>/tmp/results/codes
    done
    left="$(find $groups -name 'burnish-*' ! -name burnish-members) $(pgrep -f '_zygote|fallback')"
    [ "$left" = " " ] || say "as $kind: left behind: $left"
    echo "leftovers $([ "$left" = " " ] && echo 0 || echo 1) $kind" >>/tmp/results/codes
done
dmesg >/tmp/results/dmesg
tar -C /tmp -cf /dev/vdc results
sync
say end
echo o >/proc/sysrq-trigger
sleep 60
