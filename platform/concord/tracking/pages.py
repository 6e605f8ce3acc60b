"""MLflow's server, whose pages begin with trainings: an application for ``mlflow server --app-name concord``.

MLflow's pages show agents' traces until a browser has been told otherwise (*Model training*, at the top left), whatever
kind an experiment is of; from then on it remembers. This tells a browser that has not been told anything yet. Importing
it sets MLflow's server up, so only a server does.
"""

from flask import Response, request
from mlflow.server import app as _pages
from mlflow.server.fastapi_app import app

__all__ = ["app"]

# Where the pages of MLflow 3.17 remember it; other versions do not look there, and are as they are.
_FIRST_CHOICE = (
    "<script>try{const k='mlflow.workflowType_v1';"
    "if(localStorage.getItem(k)===null)localStorage.setItem(k,'\"machine_learning\"')}catch{}</script>"
)


def _begin_with_trainings(response: Response) -> Response:
    if request.path.endswith("/") and response.mimetype == "text/html" and response.status_code == 200:
        response.direct_passthrough = False
        page = response.get_data(as_text=True)
        response.set_data(page.replace("<head>", f"<head>{_FIRST_CHOICE}", 1))
        response.headers.pop("ETag", None)  # of the page without it
        response.headers["Cache-Control"] = "no-store"
    return response


_pages.after_request(_begin_with_trainings)
