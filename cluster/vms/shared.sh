#!/bin/bash
# The folder that all nodes reach, /shared: the head has it on its disk (shared.sh serve), workers mount it over NFS
# (shared.sh mount HEAD).
set -eu

case $1 in
serve)
    sudo install --directory --owner "$(id -u)" --group "$(id -g)" --mode 700 /shared
    # To private addresses only, of which the cloud's firewall lets the cluster's own through.
    echo "/shared 10.0.0.0/8(rw,sync,no_subtree_check) 172.16.0.0/12(rw,sync,no_subtree_check)" |
        sudo tee /etc/exports.d/concord.exports >/dev/null
    sudo exportfs -ra
    ;;
mount)
    sudo mkdir -p /shared
    mountpoint --quiet /shared || sudo mount -t nfs4 -o hard,noatime "$2:/shared" /shared
    ;;
*)
    echo "shared.sh: $1: is neither serve nor mount" >&2
    exit 2
    ;;
esac
