#!/bin/bash
# Sets up a new node: setup.sh head|worker PACKAGE... makes ~/venv with the Python and the package versions that Concord
# is tested with, and installs the cloud's PACKAGEs. Meant for Ubuntu. A second call changes nothing.
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
    # mlflow.sh makes its own database, which opens no port; Debian's default database opens one.
    sudo mkdir -p /etc/postgresql-common/createcluster.d
    echo "create_main_cluster = false" | sudo tee /etc/postgresql-common/createcluster.d/concord.conf >/dev/null
fi
install="sudo DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=600 --quiet --yes"
$install update
# shellcheck disable=SC2086 # these are words
$install install $packages
[ "$role" != head ] || $install install postgresql

# Ubuntu has another version of Python, and Ray needs the same version on client and cluster.
[ -x ~/uv/bin/uv ] || { python3 -m venv ~/uv && ~/uv/bin/pip install --quiet "uv==$uv"; }
[ -x ~/venv/bin/python ] || ~/uv/bin/uv venv --quiet --python "$python" ~/venv
~/uv/bin/uv pip install --quiet --python ~/venv/bin/python --constraint ~/concord/constraints.txt \
    "$HOME/concord$extras" "$@"

line='. ~/concord/cluster/vms/node.sh'
grep -qxF "$line" ~/.bashrc || echo "$line" >>~/.bashrc
