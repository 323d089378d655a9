#!/usr/bin/env bash
# How does one machine stand for several hosts on a network?
#
#   benchmarks/hosts.sh up N [RATE]       make hosts 0 to N-1; RATE, such as 1gbit, is each link's speed, both ways
#   benchmarks/hosts.sh run I COMMAND...  run a command on host I (in its place: same process, signals, exit code)
#   benchmarks/hosts.sh link I down|up    pull host I's cable out of the switch, or put it back
#   benchmarks/hosts.sh down              end what still runs on the hosts, and remove them; also where there are none
#
# A host is a network namespace with an interface eth0 at 10.77.0.(I+1), and lo. The switch is a bridge in a namespace of
# its own, so nothing is seen by the machine's network, and hosts of different prefixes never meet although their
# addresses are the same: PREFIX (default lb, at most 10 letters and digits) names them, PREFIX0, PREFIX1, ... and
# PREFIXsw. On host I `run` gives a command the host name PREFIXI and GLOO_SOCKET_IFNAME=eth0, so that gloo's ranks meet
# over the network and find out which of them share a host.
#
# RATE is enforced by a token bucket (tc tbf) at both ends of each cable. Its burst is 128 kB, room for what TCP sends in
# one piece: after a pause the first 128 kB pass at the speed of the machine (1 ms of a gigabit link). The queue holds
# 50 ms; what comes beyond is dropped, as a switch does. There is no added latency: the kernel's netem is often missing.
#
# It needs root, ip and tc (apt-get install iproute2). Exit codes: 0 done, 1 asked for what cannot be, 2 not on this
# machine (one sentence says why).
set -euo pipefail

prefix=${PREFIX:-lb}
most=250

fail() { echo "hosts.sh: $2" >&2; exit "$1"; }
usage() { sed -n '3,6s/^#   //p' "$0" >&2; exit 1; }

[[ $prefix =~ ^[A-Za-z0-9]{1,10}$ ]] || fail 1 "PREFIX is 1 to 10 letters and digits; got '$prefix'."
[[ $(id -u) == 0 ]] || fail 2 "network namespaces need root; run it with sudo."
for program in ip tc; do
    command -v $program >/dev/null || fail 2 "it needs the program $program; run: apt-get install iproute2"
done

names() { ip netns list | awk '{print $1}' | grep -E "^$prefix([0-9]+|sw)\$" || true; }

need() { # host I exists
    [[ ${1:-} =~ ^[0-9]+$ && -e /run/netns/$prefix$1 ]] || fail 1 "there is no host '${1:-}' of prefix $prefix; run up first."
}

up() {
    local hosts=$1 rate=${2:-} made
    [[ $hosts =~ ^[0-9]+$ ]] && ((hosts >= 1 && hosts <= most)) || fail 1 "N is 1 to $most hosts; got '$hosts'."
    [[ -z $(names) ]] || fail 1 "hosts of prefix $prefix are up already; run down first, or set PREFIX."
    made=$(ip netns add "${prefix}sw" 2>&1) || fail 2 "this machine makes no network namespaces: $made"
    trap down ERR
    made=$(ip -n "${prefix}sw" link add switch type bridge 2>&1) || { down; fail 2 "no bridge here: $made"; }
    ip -n "${prefix}sw" link set switch up
    for ((host = 0; host < hosts; host++)); do
        ip netns add "$prefix$host"
        made=$(ip -n "${prefix}sw" link add "port$host" type veth peer name eth0 netns "$prefix$host" 2>&1) ||
            { down; fail 2 "no veth pairs here: $made"; }
        ip -n "${prefix}sw" link set "port$host" master switch up
        ip -n "$prefix$host" address add "10.77.0.$((host + 1))/24" dev eth0
        ip -n "$prefix$host" link set lo up
        ip -n "$prefix$host" link set eth0 up
        if [[ -n $rate ]]; then
            for end in "$prefix$host eth0" "${prefix}sw port$host"; do
                made=$(tc -n ${end% *} qdisc add dev ${end#* } root tbf rate "$rate" burst 128kb latency 50ms 2>&1) ||
                    { down; fail 2 "tc does not shape to '$rate' here: $made"; }
            done
        fi
    done
}

down() {
    local name pids
    for name in $(names); do
        pids=$(ip netns pids "$name" 2>/dev/null || true)
        [[ -z $pids ]] || kill -KILL $pids 2>/dev/null || true
        ip netns delete "$name" 2>/dev/null || true
    done
}

case ${1:-} in
    up) (($# == 2 || $# == 3)) || usage; up "$2" "${3:-}" ;;
    down) (($# == 1)) || usage; down ;;
    run)
        (($# >= 3)) || usage
        need "$2"
        export GLOO_SOCKET_IFNAME=eth0
        exec ip netns exec "$prefix$2" unshare --uts \
            sh -c 'echo "$0" >/proc/sys/kernel/hostname; exec "$@"' "$prefix$2" "${@:3}"
        ;;
    link)
        (($# == 3)) && [[ $3 == up || $3 == down ]] || usage
        need "$2"
        ip -n "${prefix}sw" link set "port$2" "$3"
        ;;
    *) usage ;;
esac
