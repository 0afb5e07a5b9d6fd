# Training on NVIDIA GPUs. jax brings the CUDA libraries; the host needs a driver and the NVIDIA container toolkit.
#   docker build -f docker/gpu.Dockerfile -t mugrpo-gpu .
#   docker run --gpus all -v "$PWD/runs:/training/runs" mugrpo-gpu train quickstart
# We had no machine to build this image on: it is untested.
FROM python:3.12-slim
COPY . /src
RUN cd /src && pip install --no-cache-dir '.[train,cuda]'
WORKDIR /training
ENTRYPOINT ["mugrpo"]
