"""Read the attributes that the metadata server of a TPU VM gives about its slice."""

import contextlib
import http.client
import importlib.util
import time
import urllib.error
import urllib.request
from collections.abc import Mapping

_TRIES = 5
_TIMEOUT_S = 5.0


def tpu_attribute(name: str, environment: Mapping[str, str]) -> str | None:
    """Return an attribute of this TPU VM; None if this is no TPU VM or if it has no such attribute.

    `import jax` sets TPU_SKIP_MDS_QUERY on a machine without TPU chips. Then no server is asked.
    """
    if "TPU_SKIP_MDS_QUERY" in environment or importlib.util.find_spec("libtpu") is None:
        return None
    server = environment.get("GCE_METADATA_IP", "metadata.google.internal")
    request = urllib.request.Request(
        f"http://{server}/computeMetadata/v1/instance/attributes/{name}",
        headers={"Metadata-Flavor": "Google"},
    )
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is on this machine
    for attempt in range(_TRIES):
        time.sleep(0.5 * attempt)
        try:
            with directly.open(request, timeout=_TIMEOUT_S) as reply:
                return reply.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
        except (OSError, http.client.HTTPException):
            continue
    return None


def tpu_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the attribute `tpu-env`, whose lines read NAME: 'value'."""
    lines = (tpu_attribute("tpu-env", environment) or "").splitlines()
    found = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            name, value = line.split(":", 1)
            found[name.strip()] = value.strip().strip("'")
    return found
