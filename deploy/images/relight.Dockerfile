# Relight's own images: one build, four targets. From the root of the repository:
#
#   docker build -f deploy/images/relight.Dockerfile --target controller -t REGISTRY/relight/controller:0.1.0 .
#   docker build -f deploy/images/relight.Dockerfile --target gateway    -t REGISTRY/relight/gateway:0.1.0 .
#   docker build -f deploy/images/relight.Dockerfile --target agent      -t REGISTRY/relight/agent:0.1.0 .
#
# BASE may name a mirror of the same image, or one by digest.
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The compiler is for the one-pass copy; it stays here.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc=4:12.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY requirements/control.txt requirements/control.txt
COPY pyproject.toml README.md ./
# What the lock has for tests and tools is left out: pip takes of it what the package asks for, at the versions that it pins.
RUN grep -E '^[A-Za-z0-9._-]+==' requirements/control.txt > constraints.txt
COPY core core
COPY transfer transfer
COPY agent agent
COPY controller controller
COPY gateway gateway
COPY protos protos
COPY plugin plugin
COPY src src
# Engines' images have other interpreters: what the plugin needs compiled comes for those too.
RUN python -m venv /opt/relight \
    && /opt/relight/bin/pip install --no-cache-dir --constraint constraints.txt . \
    && for version in 3.12 3.13 3.14; do \
         /opt/relight/bin/pip download --no-cache-dir --constraint constraints.txt --no-deps --only-binary :all: \
           --python-version "$version" --dest /opt/relight/share/relight/wheels xxhash; \
       done \
    && /opt/relight/bin/pip uninstall --yes pip setuptools

FROM ${BASE} AS base
COPY --from=build /opt/relight /opt/relight
ENV PATH=/opt/relight/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# A number, so that a cluster sees that it is not root.
USER 65532:65532
WORKDIR /tmp

FROM base AS controller
EXPOSE 8443 8444 7402 7403
ENTRYPOINT ["relight-controller"]
CMD ["--config", "/etc/relight/controller.json"]

FROM base AS gateway
EXPOSE 8080
ENTRYPOINT ["relight-gateway"]
CMD ["--config", "/etc/relight/gateway.json"]

# Runs beside engines, and brings supervisor and plugin into their containers (relight-inject).
FROM base AS agent
EXPOSE 8000
ENTRYPOINT ["relight-agent"]
CMD ["--config", "/etc/relight/agent.json"]
