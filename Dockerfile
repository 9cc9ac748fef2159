# Images with the program in /opt/xmod:
#
#   docker build -t xmod .                       for NVIDIA GPUs
#   docker build -t xmod-cpu --target cpu .      to try and test it without one
#
#   docker run --rm -it --gpus all --ipc=host -v "$PWD/runs:/opt/xmod/runs" xmod deepspeed pretrain_xmod.py --config ...
#   docker run --rm xmod-cpu python -m pytest tests/unit
#
# --ipc=host: NCCL and the gloo of several processes share memory, more than docker's default of 64 MB.

# NVIDIA's PyTorch image. Release 26.07 is the one with torch 2.13, which the tests run with.
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3

FROM python:3.11-slim AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/xmod
# What the program needs is a layer of its own, made again only when its list changes.
COPY constraints.txt pyproject.toml setup.py README.md ./
COPY megatron_xmod/__init__.py megatron_xmod/
# torch from PyPI brings the CUDA libraries along. Give the address of PyTorch's CPU builds to save some GB:
# --build-arg PIP_EXTRA_INDEX_URL=...
ARG PIP_EXTRA_INDEX_URL
# torch first: what depends on it then finds it there.
RUN pip install --no-cache-dir -c constraints.txt torch && pip install --no-cache-dir -c constraints.txt -e '.[test]'
COPY . .
ENV DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
CMD ["bash"]

FROM ${BASE} AS cuda
WORKDIR /opt/xmod
COPY constraints.txt pyproject.toml setup.py README.md ./
COPY megatron_xmod/__init__.py megatron_xmod/
# What is in the image stays as NVIDIA built and tested it, torch above all; only what it lacks is added, in the
# versions of constraints.txt. The image's own PIP_CONSTRAINT is left aside: it also pins packages that are not there.
RUN pip list --format=freeze > /tmp/present.txt \
    && awk -F== '{name = tolower($1); gsub(/[_.]/, "-", name)} NR == FNR {present[name]; next} !(name in present)' \
        /tmp/present.txt constraints.txt > /tmp/missing.txt \
    && PIP_CONSTRAINT='' pip install --no-cache-dir -c /tmp/present.txt -c /tmp/missing.txt -e . deepspeed tensorboard
COPY . .
ENV OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
