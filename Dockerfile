# One image for every service: the command says which. Built in two stages, runs as nobody.
FROM python:3.13-slim AS build
WORKDIR /src
COPY requirements/base.txt requirements/build.in requirements/
RUN python -m venv /opt/lbledger \
 && /opt/lbledger/bin/pip install --no-cache-dir --require-hashes -r requirements/base.txt \
 && /opt/lbledger/bin/pip install --no-cache-dir -r requirements/build.in
COPY pyproject.toml README.md LICENSE ./
COPY services services
COPY schema schema
COPY sandbox sandbox
RUN /opt/lbledger/bin/pip install --no-cache-dir --no-deps --no-build-isolation . \
 && /opt/lbledger/bin/python -m compileall -q /opt/lbledger/lib

FROM python:3.13-slim
COPY --from=build /opt/lbledger /opt/lbledger
ENV PATH=/opt/lbledger/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    LBLEDGER_LOG_FORMAT=json \
    LBLEDGER_HEALTH_HOST=0.0.0.0 \
    LBLEDGER_HEALTH_PORT=8080
USER 65532:65532
EXPOSE 8080
ENTRYPOINT ["lbledger"]
CMD ["--help"]
