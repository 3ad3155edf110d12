# An engine's image with Relight in it: for the container `agent` of pools whose engine the agent has to see (vLLM), and for
# clusters that do not want files injected. BASE is the engine's own image; nothing of it is changed.
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
# The agent's own interpreter and libraries, beside the engine's: those of the engine are left alone.
COPY --from=relight /usr/local/bin/python3.11 /usr/local/bin/python3.11
COPY --from=relight /usr/local/lib/libpython3.11.so.1.0 /usr/local/lib/libpython3.11.so.1.0
COPY --from=relight /usr/local/lib/python3.11 /usr/local/lib/python3.11
COPY --from=relight /opt/relight /opt/relight
# Last, so that `python3` stays the engine's.
ENV PATH=$PATH:/opt/relight/bin \
    PYTHONPATH=/opt/relight-engine/lib
# As which user it runs is left to BASE: devices' files are opened as it needs them.
ENTRYPOINT ["/opt/relight-engine/bin/relight-supervisor"]
CMD ["/relight/state"]
