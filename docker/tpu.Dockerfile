# Training on a TPU VM. On a slice, run the same command on every host; the hosts find each other.
#   docker build -f docker/tpu.Dockerfile -t mugrpo-tpu .
#   docker run --privileged --net=host -v "$PWD/runs:/training/runs" mugrpo-tpu train quickstart
# We had no machine to build this image on: it is untested.
FROM python:3.12-slim
COPY . /src
RUN cd /src && pip install --no-cache-dir '.[train,tpu]'
WORKDIR /training
ENTRYPOINT ["mugrpo"]
