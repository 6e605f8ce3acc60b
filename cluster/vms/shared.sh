#!/bin/bash
# The shared folder of all nodes, /shared: the head serves it from its disk (shared.sh serve), and workers mount it over
# NFS (shared.sh mount HEAD).
set -eu

case $1 in
serve)
    sudo install --directory --owner "$(id -u)" --group "$(id -g)" --mode 700 /shared
    # Only to private addresses; of these the cloud's firewall admits the cluster's.
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
