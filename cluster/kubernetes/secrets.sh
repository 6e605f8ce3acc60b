#!/usr/bin/env bash
# Make the missing secrets that the manifests name: tokens and passwords of 256 random bits. Existing secrets stay as
# they are. No value is printed, passed as an argument or written to a file.
#
#   secrets.sh [NAMESPACE]      an existing namespace; the default is concord
set -euo pipefail

namespace=${1:-concord}

# secret NAME KEY[=VALUE]...; a key without a value gets a random one
secret() {
    local name=$1 key
    shift
    if kubectl --namespace "$namespace" get secret "$name" --output name >/dev/null 2>&1; then
        echo "secret $name: there already, left as it is"
        return
    fi
    for key in "$@"; do
        case $key in
            *=*) echo "$key" ;;
            *) echo "$key=$(openssl rand -hex 32)" ;;
        esac
    done | kubectl --namespace "$namespace" create secret generic "$name" --from-env-file=/dev/stdin >/dev/null
    echo "secret $name: made"
}

secret concord auth_token # of Ray; KubeRay reads the secret with the cluster's name
secret mlflow-server admin-username=admin admin-password session-key
secret mlflow-user username=concord password # of the jobs
secret postgres superuser-password mlflow-password
secret object-storage access-key secret-key
