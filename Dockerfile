# The harness in an image: docker build -t mla .          for a GPU: docker build --build-arg TORCH=cuda -t mla .
# The report stays in this folder: docker run --rm -v "$PWD:/work" mla certify --tier smoke     (for a GPU: --gpus all)
FROM python:3.11-slim
ARG TORCH=cpu
# Triton compiles its launchers; git names the commit of a mounted checkout that is installed by pip -e, as in VS Code.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
COPY . /opt/mla-conformance
RUN cd /opt/mla-conformance && \
    if [ "$TORCH" = cpu ]; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi && \
    pip install --no-cache-dir -c ci/constraints.txt .
WORKDIR /work
ENTRYPOINT ["mla-conformance"]
