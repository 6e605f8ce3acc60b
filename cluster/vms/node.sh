# shellcheck shell=bash
# Sourced on every node by ~/.bashrc: the environment of Ray and Concord.
export PATH=$HOME/venv/bin:$PATH
export RAY_AUTH_MODE=token # the token is in ~/.ray/auth_token
export CONCORD_PYTHON=$HOME/venv/bin/python CONCORD_OUTPUT=/shared/concord-runs

# MLflow's address and account: tracking HEAD aws REGION SECRET, or tracking HEAD gcp PROJECT SECRET. Ray's processes
# inherit the variables; the password is stored nowhere else.
tracking() {
    export MLFLOW_TRACKING_URI=http://$1:5000 MLFLOW_TRACKING_USERNAME=concord MLFLOW_TRACKING_PASSWORD
    MLFLOW_TRACKING_PASSWORD=$("$CONCORD_PYTHON" ~/concord/cluster/vms/read_secret.py "$2" "$3" "$4")
}
