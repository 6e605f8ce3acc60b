#!/bin/bash
# The image runs this once, on an empty volume. Creates MLflow's role, which is no superuser, and its two databases.
set -euo pipefail
psql --no-psqlrc --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname postgres <<'SQL'
\getenv password MLFLOW_PASSWORD
CREATE ROLE mlflow LOGIN PASSWORD :'password';
CREATE DATABASE mlflow OWNER mlflow;
CREATE DATABASE mlflow_auth OWNER mlflow;
REVOKE CONNECT ON DATABASE mlflow, mlflow_auth FROM PUBLIC;
SQL
