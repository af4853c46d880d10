# vLLM with headgate's policies in it, compiled. From the root of a clone:
#   docker build -f deploy/vllm.Dockerfile -t headgate-vllm:0.1.0 .
# The wheel is built in the same image: its Python and its C library are those it will run with.
FROM vllm/vllm-openai:v0.32.0 AS build
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY src src
RUN HEADGATE_COMPILE=1 uv build --wheel --no-cache --out-dir /wheels .

FROM vllm/vllm-openai:v0.32.0
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    uv pip install --system --no-cache /wheels/*.whl
