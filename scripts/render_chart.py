"""Writes ``deploy/kubernetes.yaml``: what the chart of ``deploy/helm`` gives without any values, for those who have no
Helm. A test compares the chart with what the file was made of.

    python scripts/render_chart.py   # needs helm
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy" / "helm" / "shadowkv"
RENDERED = ROOT / "deploy" / "kubernetes.yaml"
HEADER = """\
# One server with one GPU, on Kubernetes with NVIDIA's device plugin: the chart of deploy/helm with its default values,
# for those who have no Helm. Made by scripts/render_chart.py of the chart {digest}.
# The image is that of docker/Dockerfile.cuda, in a registry that the nodes can pull from.
#   kubectl create secret generic shadowkv --from-literal=api-keys=KEY --from-literal=hf-token=TOKEN
#   kubectl apply -f deploy/kubernetes.yaml
# The secret has to be there: without keys the server would answer anybody.
# For two GPUs: --tensor-parallel-size=2 among the args, and nvidia.com/gpu: 2 in limits.
"""


def digest() -> str:
    """Names what is rendered: the chart's values and templates."""
    files = [CHART / "Chart.yaml", CHART / "values.yaml", *sorted((CHART / "templates").glob("[!N]*"))]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:16]


def rendered() -> str:
    """The manifests, by Helm."""
    command = ["helm", "template", "shadowkv", str(CHART)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return HEADER.format(digest=digest()) + text


if __name__ == "__main__":
    RENDERED.write_text(rendered())
