# Builds ringfetchd and ringfetch. Needs nothing from the network but the crates of Cargo.lock.

FROM rust:1-bookworm AS build
WORKDIR /src
# rust-toolchain.toml stays outside: it would make rustup fetch another toolchain than the image's.

# Dependencies first, from manifests alone, so that a change of the code does not build them again.
COPY Cargo.toml Cargo.lock ./
COPY crates/proto/Cargo.toml crates/proto/
COPY crates/engine/Cargo.toml crates/engine/
COPY crates/server/Cargo.toml crates/server/
COPY crates/client/Cargo.toml crates/client/
COPY crates/bench/Cargo.toml crates/bench/
RUN mkdir crates/proto/src crates/engine/src crates/server/src crates/client/src crates/bench/src \
    crates/engine/benches crates/server/benches \
 && touch crates/engine/benches/pieces.rs crates/server/benches/pieces.rs \
 && touch crates/proto/src/lib.rs crates/engine/src/lib.rs crates/server/src/lib.rs crates/client/src/lib.rs \
 && echo 'fn main() {}' | tee crates/proto/build.rs crates/server/src/main.rs >crates/bench/src/main.rs \
 && cargo build --release --locked --package ringfetch-server --package ringfetch-cli

COPY proto proto
COPY config config
COPY crates crates
# cargo compares times, and those of the checkout are older than those of the stand-ins above.
RUN find crates -name '*.rs' -exec touch {} + \
 && cargo build --release --locked --package ringfetch-server --package ringfetch-cli \
 && mkdir /out \
 && objcopy --strip-debug target/release/ringfetchd /out/ringfetchd \
 && objcopy --strip-debug target/release/ringfetch /out/ringfetch

FROM debian:bookworm-slim
COPY --from=build /out/ /usr/local/bin/
COPY deploy/config/ringfetchd.yaml /etc/ringfetch/ringfetchd.yaml
# A number, so that an orchestrator can see that it is not root. Nothing is written: the root may be read-only.
USER 65532:65532
EXPOSE 7410 7411
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["ringfetchd", "healthcheck"]
# Also for `healthcheck` above, and for `docker exec ... ringfetchd print-config`.
ENV RINGFETCH_CONFIG=/etc/ringfetch/ringfetchd.yaml
ENTRYPOINT ["ringfetchd"]
