# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
#
# GPU container: PyTorch and Transformer Engine from the base image, and this package.
#
#   docker build --build-arg BASE_IMAGE=<image> --tag nemo-aligner-mcore .
#   docker run --gpus all --ipc=host --network=host -it nemo-aligner-mcore
#
# BASE_IMAGE: an image with the CUDA toolkit, PyTorch 2.6 to 2.13 and Python 3.10 to 3.12, such as
# NVIDIA's PyTorch container; docs/jobs.md compares two of its releases with our ranges.
# --ipc=host (or --shm-size=1g): NCCL and Triton's processes share memory through /dev/shm, whose
# default size is 64 MB.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}

# A tag, branch or commit of Transformer Engine to build in place of the image's, or where the image
# has none (v2.11 with Megatron Core 0.16); empty: keep the image's.
ARG TE_REF=
ARG APEX_REF=master
# 1: build apex too, whose kernel model.gradient_accumulation_fusion takes.
ARG WITH_APEX=0
# Compute capabilities to compile for: 8.0 A100, 9.0 H100 and H200.
ARG TORCH_CUDA_ARCH_LIST="8.0 9.0"
ARG MAX_JOBS=8
ENV TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST} MAX_JOBS=${MAX_JOBS}

# Some base images pin every package; pip then refuses PyTriton, which asks for numpy below 2.
ENV PIP_CONSTRAINT="" PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

# The served critic needs the shared libpython.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git ninja-build python3-dev \
    && rm -rf /var/lib/apt/lists/*

RUN if [ -n "${TE_REF}" ]; then NVTE_FRAMEWORK=pytorch pip install --no-build-isolation \
        "git+https://github.com/NVIDIA/TransformerEngine.git@${TE_REF}"; fi

RUN if [ "${WITH_APEX}" = 1 ]; then git clone https://github.com/NVIDIA/apex /opt/apex \
    && cd /opt/apex && git checkout ${APEX_REF} \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install -v --no-build-isolation . \
    && rm -rf /opt/apex/build; fi

WORKDIR /opt/nemo_aligner
# First only what setup.py reads, so that a change in the code does not repeat the installation.
COPY setup.py pyproject.toml LICENSE ./
COPY nemo_aligner/__init__.py nemo_aligner/
RUN torch_before=$(python -c 'import torch; print(torch.__version__)') \
    && pip install --editable '.[test]' \
    && test "$torch_before" = "$(python -c 'import torch; print(torch.__version__)')"

COPY . .
RUN python -c 'import nemo_aligner, megatron.core, nemo, pytriton, transformer_engine'
CMD ["bash"]
