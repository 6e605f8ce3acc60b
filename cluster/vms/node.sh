# shellcheck shell=bash
# Sourced on every node, by ~/.bashrc: what Ray and Concord find in their environment.
export PATH=$HOME/venv/bin:$PATH
export RAY_AUTH_MODE=token # the token is in ~/.ray/auth_token
export CONCORD_PYTHON=$HOME/venv/bin/python CONCORD_OUTPUT=/shared/concord-runs

# Where MLflow is, and its account: tracking HEAD aws REGION SECRET, or tracking HEAD gcp PROJECT SECRET. Ray's processes
# inherit it, and it is kept nowhere else.
tracking() {
    export MLFLOW_TRACKING_URI=http://$1:5000 MLFLOW_TRACKING_USERNAME=concord MLFLOW_TRACKING_PASSWORD
    MLFLOW_TRACKING_PASSWORD=$("$CONCORD_PYTHON" ~/concord/cluster/vms/read_secret.py "$2" "$3" "$4")
}
