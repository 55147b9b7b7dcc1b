# Builds ringfetchd and ringfetch, and puts them and the libraries they need into an image of nothing else: no shell, no
# package manager. Needs nothing from the network but the crates of Cargo.lock. Any builder with glibc, gcc and cargo
# will do (deploy/offline-images makes one where no image can be pulled).

# The toolchain that rust-toolchain.toml names; .ci/versions compares them. That file stays outside: rustup would fetch
# its components.
ARG RUST_VERSION=1.95.0
ARG RUST_IMAGE=rust:${RUST_VERSION}-bookworm
FROM ${RUST_IMAGE} AS build
WORKDIR /src

# Compiled with a profile (docs/adr/0018) if release/ringfetch.profdata is there; Cargo.lock only keeps this from failing without
# it. The profile names functions as they are named when cargo is called with --target, as release/compile does.
COPY Cargo.lock release/ringfetch.profdat[a] ./
RUN mkdir .cargo \
 && { printf '[build]\ntarget = "%s"\n' "$(rustc --version --verbose | sed -n 's/^host: //p')" \
   && if [ -e ringfetch.profdata ]; then echo 'rustflags = ["-Cprofile-use=/src/ringfetch.profdata"]'; fi; } >.cargo/config.toml

# Dependencies first, from manifests alone, so that a change of the code does not build them again.
COPY Cargo.toml Cargo.lock ./
COPY crates/proto/Cargo.toml crates/proto/
COPY crates/command/Cargo.toml crates/command/
COPY crates/host/Cargo.toml crates/host/
COPY crates/engine/Cargo.toml crates/engine/
COPY crates/pattern/Cargo.toml crates/pattern/
COPY crates/pace/Cargo.toml crates/pace/
COPY crates/score/Cargo.toml crates/score/
COPY crates/server/Cargo.toml crates/server/
COPY crates/client/Cargo.toml crates/client/
COPY crates/cli/Cargo.toml crates/cli/
COPY crates/lab/Cargo.toml crates/lab/
COPY crates/baselines/Cargo.toml crates/baselines/
COPY crates/slowdisk/Cargo.toml crates/slowdisk/
COPY crates/adversary/Cargo.toml crates/adversary/
COPY crates/pieces/Cargo.toml crates/pieces/
# A stand-in for each target that a manifest names.
RUN mkdir -p crates/proto/src crates/command/src crates/host/src crates/engine/src crates/pattern/src crates/pace/src crates/score/src \
    crates/server/src crates/client/src crates/cli/src crates/lab/src crates/baselines/src crates/slowdisk/src crates/adversary/src crates/pieces/src \
    crates/engine/tests/contract \
 && touch crates/engine/tests/contract/main.rs \
 && touch crates/proto/src/lib.rs crates/command/src/lib.rs crates/host/src/lib.rs crates/engine/src/lib.rs \
    crates/pattern/src/lib.rs crates/pace/src/lib.rs crates/score/src/lib.rs crates/server/src/lib.rs crates/client/src/lib.rs crates/lab/src/lib.rs crates/baselines/src/lib.rs \
    crates/slowdisk/src/lib.rs crates/adversary/src/lib.rs \
 && echo 'fn main() {}' | tee crates/proto/build.rs crates/server/src/main.rs crates/slowdisk/src/main.rs \
    crates/adversary/src/main.rs crates/pieces/src/main.rs >crates/cli/src/main.rs \
 && cargo build --profile dist --locked --package ringfetch-server --package ringfetch-cli

COPY proto proto
COPY config config
COPY crates crates
# cargo compares times, and those of the checkout are older than those of the stand-ins above.
RUN find crates -name '*.rs' -exec touch {} + \
 && cargo build --profile dist --locked --package ringfetch-server --package ringfetch-cli

# What the image is made of: the programs, and what the loader would open for them (glibc has the resolver in it since 2.34).
RUN mkdir -p /out/usr/local/bin /demo \
 && for program in ringfetchd ringfetch; do \
      cp target/*/dist/"$program" "/out/usr/local/bin/$program" || exit 1; \
      ldd "/out/usr/local/bin/$program" >libraries || exit 1; \
      grep -o '/[^ ]*' libraries | xargs -I '{}' cp --dereference --parents '{}' /out || exit 1; \
    done

FROM scratch
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="ringfetch" \
      org.opencontainers.image.description="Random reads over gRPC and HTTP: ringfetchd, and ringfetch, its command line" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /out/ /
# A new volume that is mounted here gets this owner: `ringfetchd make-demo` can write to it.
COPY --from=build --chown=65532:65532 /demo /demo
COPY deploy/config/ /etc/ringfetch/
# Also for `healthcheck` below, and for `docker exec ... ringfetchd print-config`.
ENV PATH=/usr/local/bin RINGFETCH_CONFIG=/etc/ringfetch/ringfetchd.yaml
# A number, so that an orchestrator can see that it is not root. Nothing is written: the root may be read-only.
USER 65532:65532
# gRPC and HTTP. The admin service listens on the container's loopback: docker exec CONTAINER ringfetch status.
EXPOSE 7410 7411
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s CMD ["ringfetchd", "healthcheck"]
ENTRYPOINT ["ringfetchd"]
