# Image of paceline: docker build --tag registry.example/paceline:0.2.0 .
#
# pip's package of torch for x86-64 contains CUDA. --build-arg TORCH_INDEX=URL takes torch from another index; PyTorch's
# installation page has that of its smaller packages for CPUs.
FROM python:3.11-slim AS build
COPY . /paceline
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /paceline

FROM python:3.11-slim
ARG TORCH_INDEX=
ARG EXTRAS=digits,metrics
COPY constraints.txt /tmp/
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir --constraint /tmp/constraints.txt "$(ls /tmp/wheels/*.whl)${EXTRAS:+[$EXTRAS]}"
RUN useradd --create-home --uid 1000 paceline
USER 1000
WORKDIR /home/paceline
