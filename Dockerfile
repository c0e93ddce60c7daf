# The harness in an image: docker build -t mla .          for a GPU: docker build --build-arg TORCH=cuda -t mla .
#                          docker run --rm mla certify --tier smoke               docker run --rm --gpus all mla certify
FROM python:3.11-slim
ARG TORCH=cpu
# Triton compiles its launchers, and a certificate names the commit of a checkout.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev git && rm -rf /var/lib/apt/lists/*
COPY . /opt/mla-conformance
RUN cd /opt/mla-conformance && \
    if [ "$TORCH" = cpu ]; then export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu; fi && \
    pip install --no-cache-dir -c ci/constraints.txt .
WORKDIR /work
ENTRYPOINT ["mla-conformance"]
