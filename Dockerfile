# An image for a GPU host, from the same lock as run.sh. Weights and data stay outside; mount them:
#   docker build -t vlmopt --build-arg GIT_COMMIT="$(git rev-parse HEAD)" .
#   docker run --gpus all -v "$PWD/Qwen3-VL-2B-Instruct:/vlmopt/Qwen3-VL-2B-Instruct:ro" -v "$PWD/results:/vlmopt/results" vlmopt
# The devel image brings nvcc and a C++ compiler, which Triton and the compiled parts need at run time.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++=4:13.* python3-dev=3.12.* python3-venv=3.12.* \
    && rm -rf /var/lib/apt/lists/*

# The lock before the sources: editing the project rebuilds nothing above the last COPY.
WORKDIR /vlmopt
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/vlmopt PYTHONUNBUFFERED=1
COPY requirements.lock ./
RUN python3 -m venv /opt/venv \
    && python -m pip install --no-cache-dir --disable-pip-version-check --require-hashes -r requirements.lock

COPY . .
RUN python -c "from vlmopt.kernels import native; native.main()" \
    && python -c "from vlmopt.cpp_runtime import build; build.main()"
# The image holds no git; records written in it carry the commit that it was built from.
ARG GIT_COMMIT=unknown
ENV VLMOPT_GIT_COMMIT=$GIT_COMMIT
CMD ["python", "benchmark.py", "--model-path", "./Qwen3-VL-2B-Instruct", "--dataset-path", "./data", "--output", "results/result.json"]
