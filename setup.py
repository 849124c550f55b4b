# Copyright (c) 2026 the nemo_aligner authors.
# SPDX-License-Identifier: Apache-2.0
"""Package description. Install torch first and by exact version, as `make` does."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

INSTALL_REQUIRES = [
    "torch>=2.6,<2.14",  # 2.6: needed by NeMo and Megatron Core; 2.13 is what the tests ran with
    "nemo_toolkit[common]>=3.0.0,<3.1",  # exp_manager, hydra_runner, .nemo; [core] lacks einops
    # 0.17 and later need Python 3.12; docs/architecture.md says how to move to the next series
    "megatron-core>=0.16.1,<0.17; python_version < '3.12'",
    "megatron-core>=0.19.2,<0.20; python_version >= '3.12'",  # the newest that the tests ran with
    # Megatron Core 0.19 imports it, on a CPU too, without saying so
    "triton>=3; python_version >= '3.12' and platform_system == 'Linux'",
    # 0.6 lets a remote client execute code; elsewhere servers need server.frontend=asgi
    "nvidia-pytriton>=0.7.0,<0.8; platform_system == 'Linux'",
    "numpy>=1.24,<3",  # pip takes 1, for which PyTriton asks; our servers run with 2 too
    # the series NeMo 3.0 accepts; imported as lightning.pytorch, never pytorch_lightning
    "lightning>=2.4,<2.5",
    "hydra-core>=1.3.2,<1.4",  # hydra_runner and the YAML files
    "omegaconf>=2.3,<2.4",  # hydra's configuration objects
    # Megatron Core needs it without saying so: saving a checkpoint hangs for ever without
    "psutil>=5.9",
    "xxhash>=3,<5",  # checksums of checkpoints
    "transformers>=4.50,<6",  # Hugging Face tokenizers
    "sentencepiece>=0.2,<1",  # SentencePiece tokenizers
    "tokenizers>=0.20",  # the quickstart trains a byte-level BPE
    "pyarrow<26",  # 26 refuses numpy 1, for which PyTriton asks
    "datasets>=3,<6",  # maps tables into memory; folders of data files
    "packaging>=22",  # compares versions at start
    "filelock>=3.12",  # one rank makes an index, the others wait
    "safetensors>=0.4",  # weights in exchange formats
    "tensorboard>=2.15",  # default logger
    "prometheus-client>=0.20,<1",  # exp_manager.prometheus_address
    "uvicorn>=0.30,<1",  # the HTTP of servers
    "h11>=0.14,<1",  # uvicorn's reader of HTTP; our signs of life are events of it
    "pandas>=2.0",  # tables of sampled prompts and answers
    "tqdm>=4.65",  # progress bars
    "rich>=13",  # the quickstart's narrator
]

EXTRAS_REQUIRE = {
    "gpu": [
        # the range megatron-core 0.16 supports
        "transformer-engine[core_cu13,pytorch]>=2.9,<2.12; python_version < '3.12'",
        # megatron-core 0.19 has no bound; NVIDIA's NeMo image 26.08 has 2.17 with it
        "transformer-engine[core_cu13,pytorch]>=2.9,<2.18; python_version >= '3.12'",
        "flash-attn>=2.7,<2.9",  # compiled on install: pip install --no-build-isolation
    ],
    "test": [
        "pytest>=8,<10",  # the test runner
        "pytest-timeout>=2.3,<3",  # a rank that waits for a dead one must not hang the run
        "pytest-xdist>=3.6,<4",  # one file of tests per core
        "hypothesis>=6.100,<7",  # inputs for tests of properties (test_properties_*.py)
        "tritonclient[http]>=2.50,<3",  # the oracle for the wire; PyTriton brings it
        # an oracle for GAE and losses, pinned: a changed one proves nothing (more:
        # tests/oracles.txt)
        "trl==0.11.4",
    ],
    "dev": [
        "ruff==0.17.5",  # pinned: other versions format differently
        "mypy==2.4.1",  # pinned: each version finds other errors; configured in pyproject.toml
        "pre-commit>=4,<5",  # runs ruff before each commit
        "uv>=0.9,<1",  # resolves requirements/*.lock
    ],
    "docs": [
        "mkdocs>=1.6.1,<2",  # builds the site; 1.6 can generate pages, 2 has no plugins
        "mkdocs-material>=9.5,<10",  # the theme, with a dark mode; fetches nothing
        "mkdocstrings[python]>=0.28,<2",  # API pages from docstrings, read without importing
    ],
}

setup(
    name="nemo-aligner-mcore",  # the plain name belongs to NVIDIA's last release
    version=re.search(
        r'__version__ = "(.+)"', (ROOT / "nemo_aligner/__init__.py").read_text()
    ).group(1),
    description="RLHF for Megatron models on today's Megatron Core, from a laptop to a cluster",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8")
    if (ROOT / "README.md").exists()
    else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=find_packages(include=["nemo_aligner", "nemo_aligner.*"]),
    package_data={"nemo_aligner": ["conf/*.yaml"]},  # a link to conf/
    entry_points={"console_scripts": ["nemo-aligner = nemo_aligner.__main__:main"]},
    python_requires=">=3.10,<3.13",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS_REQUIRE,
    classifiers=[
        "Development Status :: 4 - Beta",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
