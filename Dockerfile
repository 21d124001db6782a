# syntax=docker/dockerfile:1
# check=error=true
#
# An image that serves one verified checkpoint with vLLM.
#
#   docker build --build-context checkpoint=DIR -t qwen .                                        a checkpoint on this machine
#   docker build --build-arg MODEL=org/name --build-arg REVISION=COMMIT -t qwen .                one on the Hub
#       (a private one: --secret id=HF_TOKEN,env=HF_TOKEN; the token is in no layer and in no argument)
#   docker run --rm --gpus all -p 8000:8000 qwen                                                 serve it
#   docker run --rm --gpus all -p 8000:8000 -e PROFILE=96gb qwen --context 65536 -- --api-key K  otherwise
#
# What comes after the image's name are options of `python -m assemble serve`, and after `--` of `vllm serve`.

# The tag is pinned, its content is not: a tag can be moved. For that give a digest,
# --build-arg BASE=vllm/vllm-openai@sha256:…, as `docker buildx imagetools inspect vllm/vllm-openai:v0.27.1` prints it.
ARG BASE=vllm/vllm-openai:v0.27.1

# This project's tool in an environment of its own: vLLM's packages stay as vLLM's image has them.
FROM ${BASE} AS tool
WORKDIR /build
COPY pyproject.toml constraints.txt README.md ./
COPY recipes recipes
COPY assemble assemble
RUN python3 -m venv --without-pip /opt/nvfp4 \
 && python3 -m pip --python /opt/nvfp4/bin/python install --no-cache-dir -c constraints.txt . \
 && /opt/nvfp4/bin/python -m assemble profiles
WORKDIR /

# The checkpoint from the Hub. With --build-context checkpoint=DIR this stage and the next are not built.
FROM tool AS download
ARG MODEL=""
ARG REVISION=""
RUN --mount=type=secret,id=HF_TOKEN \
    if [ -z "$MODEL" ]; then echo "give --build-context checkpoint=DIR, or --build-arg MODEL=org/name" >&2; exit 2; fi \
 && if ! expr "x$REVISION" : 'x[0-9a-f]\{40\}$' >/dev/null; then \
      echo "--build-arg REVISION must be a commit, 40 hex digits: a branch or tag can be moved" >&2; exit 2; fi \
 && if [ -s /run/secrets/HF_TOKEN ]; then export HF_TOKEN_PATH=/run/secrets/HF_TOKEN; fi \
 && HF_HOME=/tmp/hf /opt/nvfp4/bin/hf download "$MODEL" --revision "$REVISION" --local-dir /checkpoint \
 && rm -rf /checkpoint/.cache /tmp/hf

FROM scratch AS checkpoint
COPY --from=download /checkpoint /

FROM tool AS serve
ARG BASE
ARG MODEL=""
ARG REVISION=""
ARG GIT_COMMIT=""
# What clients call the model; and the profile that the image is for, which -e PROFILE=… changes.
ARG MODEL_NAME=model
ARG PROFILE=2x16gb-long-context
# --deep also reads every value: minutes for 20 GB.
ARG VERIFY=""
# vLLM's newer images have this user; an older one gets it here. Group 0 may write its home, so any user of that group will do.
RUN if ! getent passwd 2000 >/dev/null; then useradd --uid 2000 --gid 0 --no-log-init --create-home --home-dir /home/vllm vllm; fi \
 && mkdir -p /home/vllm/.cache && chown -R 2000:0 /home/vllm && chmod -R g=u /home/vllm
COPY --from=checkpoint --chown=2000:0 / /checkpoint/
USER 2000:0
WORKDIR /home/vllm
ENV HOME=/home/vllm \
    USER=vllm \
    MODEL_NAME=${MODEL_NAME} \
    PROFILE=${PROFILE}
# A checkpoint that breaks a rule, or that the profile's cards cannot hold, makes no image.
# hadolint ignore=SC2086
RUN /opt/nvfp4/bin/python -m assemble verify /checkpoint ${VERIFY} \
 && /opt/nvfp4/bin/python -m assemble serve /checkpoint --profile "$PROFILE" --name "$MODEL_NAME"

LABEL org.opencontainers.image.title="nvfp4-mtp serve" \
      org.opencontainers.image.description="A verified NVFP4 checkpoint with its MTP head, served by vLLM" \
      org.opencontainers.image.base.name="${BASE}" \
      org.opencontainers.image.revision="${GIT_COMMIT}" \
      nvfp4-mtp.checkpoint.model="${MODEL}" \
      nvfp4-mtp.checkpoint.revision="${REVISION}" \
      nvfp4-mtp.checkpoint.provenance="/checkpoint/provenance.json" \
      nvfp4-mtp.profile="${PROFILE}"
EXPOSE 8000
# Loading 20 GB and capturing graphs takes minutes, and so long a server that does not answer yet is not called unhealthy.
HEALTHCHECK --start-period=20m --interval=30s --timeout=5s --retries=3 \
  CMD ["/opt/nvfp4/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["/bin/sh", "-c", "exec /opt/nvfp4/bin/python -m assemble serve /checkpoint --profile \"$PROFILE\" --name \"$MODEL_NAME\" --exec \"$@\"", "serve"]
