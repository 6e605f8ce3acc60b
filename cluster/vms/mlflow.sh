#!/bin/bash
# An MLflow server that asks for a password, with PostgreSQL behind it, as this user and without systemd:
#
#   mlflow.sh start FOLDER ARTIFACTS [HOST [PORT]]
#   mlflow.sh stop FOLDER
#
# FOLDER has the database and logs; ARTIFACTS is s3://…, gs://… or a folder. The default of HOST is 127.0.0.1.
# MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD are the jobs' account, which is no administrator. Each start
# creates the account or sets its password. The first start makes the administrator's password, in
# FOLDER/administrator-password. PostgreSQL listens only on a socket in FOLDER and knows this user by its name: it has
# no password.
set -eu
umask 077

fail() {
    echo "mlflow.sh: $1" >&2
    exit "${2:-1}"
}

# The status of the server's answer to a request with (yes) or without (no) the password; 000 without an answer.
answer() {
    "$python" - "$1" "http://$reached:$port/api/2.0/mlflow/experiments/search?max_results=1" <<'PYTHON'
import base64, os, sys, urllib.error, urllib.request

request = urllib.request.Request(sys.argv[2])
if sys.argv[1] == "yes":
    account = f"{os.environ['MLFLOW_TRACKING_USERNAME']}:{os.environ['MLFLOW_TRACKING_PASSWORD']}"
    request.add_header("Authorization", "Basic " + base64.b64encode(account.encode()).decode())
try:
    print(urllib.request.urlopen(request, timeout=10).status)
except urllib.error.HTTPError as error:
    print(error.code)
except OSError:
    print("000")
PYTHON
}

running() {
    [ -s "$folder/server.pid" ] && kill -0 "$(cat "$folder/server.pid")" 2>/dev/null
}

start() {
    [ -n "${MLFLOW_TRACKING_USERNAME:-}" ] && [ -n "${MLFLOW_TRACKING_PASSWORD:-}" ] ||
        fail "MLFLOW_TRACKING_USERNAME, MLFLOW_TRACKING_PASSWORD: not set; without them nobody could be told apart" 2
    [ "$MLFLOW_TRACKING_USERNAME" != "$administrator" ] ||
        fail "MLFLOW_TRACKING_USERNAME $administrator: is the administrator's name; jobs have an account of their own" 2
    mkdir -p "$folder/socket"
    [ -s "$folder/administrator-password" ] ||
        "$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$folder/administrator-password"
    if [ ! -e "$folder/postgresql/PG_VERSION" ]; then
        "$postgresql/initdb" --pgdata "$folder/postgresql" --encoding UTF8 --auth-local peer --auth-host reject \
            >"$folder/initdb.log"
    fi
    if ! "$postgresql/pg_ctl" --pgdata "$folder/postgresql" status >/dev/null; then
        "$postgresql/pg_ctl" --pgdata "$folder/postgresql" --log "$folder/postgresql.log" --wait start >/dev/null \
            --options "-c listen_addresses='' -c unix_socket_directories='$folder/socket' -c unix_socket_permissions=0700"
    fi
    for database in mlflow mlflow_auth; do
        "$postgresql/psql" --host "$folder/socket" --dbname postgres --quiet --tuples-only \
            --command "SELECT 1 FROM pg_database WHERE datname = '$database'" | grep -q 1 ||
            "$postgresql/createdb" --host "$folder/socket" "$database"
    done
    cat >"$folder/basic_auth.ini" <<INI
[mlflow]
default_permission = READ
database_uri = postgresql+psycopg2:///mlflow_auth?host=$folder/socket
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
INI
    if ! running; then
        MLFLOW_AUTH_CONFIG_PATH=$folder/basic_auth.ini \
            MLFLOW_AUTH_ADMIN_USERNAME=$administrator \
            MLFLOW_AUTH_ADMIN_PASSWORD=$(cat "$folder/administrator-password") \
            MLFLOW_FLASK_SERVER_SECRET_KEY=$("$python" -c 'import secrets; print(secrets.token_hex(32))') \
            MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
            nohup setsid "$python" -m mlflow server --app-name basic-auth --workers 2 --host "$host" --port "$port" \
            --uvicorn-opts "--timeout-worker-healthcheck 60" \
            --allowed-hosts "$allowed" --backend-store-uri "postgresql+psycopg2:///mlflow?host=$folder/socket" \
            --artifacts-destination "$artifacts" >>"$folder/server.log" 2>&1 </dev/null &
        echo $! >"$folder/server.pid"
    fi
    for _ in $(seq 240); do
        running || fail "the server ended: $(tail -n 3 "$folder/server.log")"
        [ "$(answer no)" = 000 ] || break
        sleep 0.5
    done
    local status
    status=$(answer no)
    if [ "$status" != 401 ]; then # this server must not keep running without asking for a password
        stop
        fail "the server said $status, not 401, to a request without a password; it was stopped"
    fi
    MLFLOW_AUTH_ADMIN_USERNAME=$administrator MLFLOW_AUTH_ADMIN_PASSWORD=$(cat "$folder/administrator-password") \
        JOBS_USERNAME=$MLFLOW_TRACKING_USERNAME JOBS_PASSWORD=$MLFLOW_TRACKING_PASSWORD \
        "$python" "$accounts" "http://$reached:$port" 2>"$folder/accounts.log" ||
        fail "the jobs' account could not be made: $(tail -n 1 "$folder/accounts.log")"
    for _ in $(seq 140); do # the server caches a former password for a minute
        [ "$(answer yes)" != 200 ] || break
        sleep 0.5
    done
    [ "$(answer yes)" = 200 ] || fail "the jobs' account is refused; $folder/server.log says why"
    echo "MLflow: http://$reached:$port"
}

stop() {
    if running; then
        kill -TERM -- "-$(cat "$folder/server.pid")" || true
        while running; do sleep 0.2; done
    fi
    rm -f "$folder/server.pid"
    if "$postgresql/pg_ctl" --pgdata "$folder/postgresql" status >/dev/null; then
        "$postgresql/pg_ctl" --pgdata "$folder/postgresql" --mode fast --wait stop >/dev/null
    fi
}

[ $# -ge 2 ] || fail "usage: mlflow.sh start FOLDER ARTIFACTS [HOST [PORT]], or mlflow.sh stop FOLDER" 2
python=${CONCORD_PYTHON:-python}
administrator=administrator
accounts=$(dirname "$(realpath "$0")")/../kubernetes/mlflow/add_user.py
folder=$(realpath --canonicalize-missing "$2") artifacts=${3:-} host=${4:-127.0.0.1} port=${5:-5000}
postgresql=$(find /usr/lib/postgresql -path '*/bin/initdb' 2>/dev/null | sort --version-sort | tail -n 1)
[ -n "$postgresql" ] || fail "PostgreSQL: not below /usr/lib/postgresql; apt-get install postgresql" 2
postgresql=$(dirname "$postgresql")
# If the server listens on all addresses, clients use this machine's first one. The allowed host names are listed
# anyway.
reached=$host
[ "$host" != 0.0.0.0 ] || reached=$(hostname --all-ip-addresses | cut -d ' ' -f 1)
allowed=$reached:$port,localhost:$port,127.0.0.1:$port

case $1 in
start)
    [ -n "$artifacts" ] || fail "start: no ARTIFACTS given" 2
    start
    ;;
stop) stop ;;
*) fail "$1: is neither start nor stop" 2 ;;
esac
