# docker build -t shardconv .                              # CPU
# docker build -t shardconv --build-arg BACKEND=cu130 .    # CUDA 13.0; uv lists the names for --torch-backend
# docker run --rm -v "$PWD:/data" shardconv split model --tp 8
FROM python:3.12-slim
ARG BACKEND=cpu
RUN pip install --no-cache-dir uv
COPY . /src
RUN uv pip install --system --no-cache --torch-backend "$BACKEND" --constraint /src/constraints.txt '/src[transformers,remote]'
WORKDIR /data
ENTRYPOINT ["shardconv"]
