#!/usr/bin/env bash
# Installs the released packages that benchmarks compare largebatch with: make_peers.sh VENV PEERS_VENV
# They are old and pin much that they do not need here, so each is installed without its dependencies; torch, numpy
# and scipy are those of VENV.
set -euo pipefail

venv=$1 peers=$2
[ -x "$peers/bin/python" ] || "$venv/bin/python" -m venv "$peers"
site=$("$peers/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
base=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
echo "$base" > "$site/zz-base-environment.pth"

pip() { "$peers/bin/python" -m pip --disable-pip-version-check --quiet install "$@"; }

pip "setuptools<81" wheel
pip --no-deps gns-pytorch==0.1.5
pip --no-deps --no-build-isolation fairscale==0.4.13
pip --no-deps adaptdl==0.2.11
pip autograd==1.9.1 pandas==3.1.1 portpicker==1.6.0 redis==8.1.0 requests==2.34.2 semver==3.1.2
# Only k_diffusion/gns.py is used, loaded by its path: importing the package would need some fifteen others.
pip --no-deps k-diffusion==0.1.1.post1

"$peers/bin/python" - <<'PY'
import importlib.metadata as metadata
import importlib.util
from pathlib import Path

import fairscale.optim
import gns_pytorch
import adaptdl.torch.gradient_noise_scale

path = Path(next(str(file.locate()) for file in metadata.files("k-diffusion") if file.name == "gns.py"))
spec = importlib.util.spec_from_file_location("k_diffusion_gns", path)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
for name in ("gns-pytorch", "fairscale", "adaptdl", "k-diffusion", "torch"):
    print(f"{name} {metadata.version(name)}")
PY
