# An engine's image with supervisor and plugin in it, for clusters that do not want files injected into pods, and for hosts
# without Kubernetes. BASE is the engine's own image; nothing of it is changed. Slot pods do not need it: they take BASE as it is.
#
#   CPU     docker build -f deploy/images/engine.Dockerfile --build-arg BASE=REGISTRY/vllm-cpu:0.32.0 -t ... .
#   CUDA    docker build -f deploy/images/engine.Dockerfile --build-arg BASE=docker.io/vllm/vllm-openai:v0.32.0 -t ... .
#   Kunlun  docker build -f deploy/images/engine.Dockerfile --build-arg BASE=REGISTRY/vllm-kunlun:TAG -t ... .
#
# Supervisor and plugin come out of Relight's agent image of the same version.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0
ARG AGENT=registry.example/relight/agent:0.1.0

FROM ${AGENT} AS relight
RUN ["relight-inject", "/tmp/relight"]

FROM ${BASE} AS engine
COPY --from=relight /tmp/relight /opt/relight-engine
# As which user it runs is left to BASE: devices' files are opened as it needs them.
ENTRYPOINT ["/opt/relight-engine/bin/relight-supervisor"]
CMD ["/relight/state"]
