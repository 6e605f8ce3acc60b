#!/bin/bash
# What a new node needs, once: setup.sh head|worker PACKAGE... makes ~/venv with the Python and the versions that Concord
# is tested with, and PACKAGEs for the cloud beside it. Meant for Ubuntu; a second call finds everything there.
set -eu

python=3.11
uv=0.13.9

role=$1
shift
extras='[coinrun]'
packages="python3-venv rsync nfs-common"
if [ "$role" = head ]; then
    extras='[coinrun,server]'
    packages="$packages nfs-kernel-server postgresql-common"
    # mlflow.sh makes a database of its own, which listens on no port; Debian's would.
    sudo mkdir -p /etc/postgresql-common/createcluster.d
    echo "create_main_cluster = false" | sudo tee /etc/postgresql-common/createcluster.d/concord.conf >/dev/null
fi
install="sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 --quiet --yes"
$install update
# shellcheck disable=SC2086 # these are words
$install install $packages
[ "$role" != head ] || $install install postgresql

# Ubuntu's Python is another one, and what is submitted from one version of Python is not run by another.
[ -x ~/uv/bin/uv ] || { python3 -m venv ~/uv && ~/uv/bin/pip install --quiet "uv==$uv"; }
[ -x ~/venv/bin/python ] || ~/uv/bin/uv venv --quiet --python "$python" ~/venv
~/uv/bin/uv pip install --quiet --python ~/venv/bin/python --constraint ~/concord/constraints.txt \
    "$HOME/concord$extras" "$@"

line='. ~/concord/cluster/vms/node.sh'
grep -qxF "$line" ~/.bashrc || echo "$line" >>~/.bashrc
