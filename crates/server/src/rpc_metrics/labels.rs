//! The closed sets of labels: methods, and codes of gRPC and HTTP.

/// An enum of methods with the `method` label of each.
macro_rules! methods {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $method:ident = $label:literal,)* }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $method,)* }

        impl $name {
            pub(super) const LABELS: &[&str] = &[$($label),*];
        }
    };
}

methods! {
    /// A gRPC method.
    GrpcMethod {
        /// FetchService.FetchBlocks.
        FetchBlocks = "FetchBlocks",
        /// FetchService.FetchVectors.
        FetchVectors = "FetchVectors",
        /// FetchService.FetchRanges.
        FetchRanges = "FetchRanges",
        /// FetchService.FetchObjects.
        FetchObjects = "FetchObjects",
        /// FetchService.ScoreVectors.
        ScoreVectors = "ScoreVectors",
        /// FetchService.FetchStream, counted once, when it ends.
        FetchStream = "FetchStream",
        /// FetchService.ReadObject, counted once, when it ends.
        ReadObject = "ReadObject",
        /// DatasetService.ListDatasets.
        ListDatasets = "ListDatasets",
        /// DatasetService.GetDataset.
        GetDataset = "GetDataset",
        /// DatasetService.ListObjects.
        ListObjects = "ListObjects",
        /// AdminService.GetStatus.
        GetStatus = "GetStatus",
        /// AdminService.SetLogLevel.
        SetLogLevel = "SetLogLevel",
        /// AdminService.SetBackend.
        SetBackend = "SetBackend",
        /// AdminService.ClearBackend.
        ClearBackend = "ClearBackend",
        /// AdminService.Reload.
        Reload = "Reload",
        /// grpc.health.v1.Health.Check.
        HealthCheck = "HealthCheck",
        /// grpc.health.v1.Health.Watch.
        HealthWatch = "HealthWatch",
        /// Server reflection, v1 and v1alpha.
        ServerReflectionInfo = "ServerReflectionInfo",
        /// Anything else.
        Other = "other",
    }
}

methods! {
    /// An operation of the HTTP API.
    HttpOperation {
        /// `GET /v1/datasets`.
        ListDatasets = "ListDatasets",
        /// `GET /v1/datasets/{name}`.
        GetDataset = "GetDataset",
        /// `GET|HEAD /v1/datasets/{name}/bytes`.
        GetBytes = "GetBytes",
        /// `GET /v1/datasets/{name}/blocks/{index}`.
        GetBlock = "GetBlock",
        /// `GET /v1/datasets/{name}/vectors/{id}`.
        GetVector = "GetVector",
        /// `GET /v1/datasets/{name}/objects`.
        ListObjects = "ListObjects",
        /// `GET /v1/datasets/{name}/objects/{object}`.
        GetObject = "GetObject",
        /// `POST /v1/datasets/{name}/blocks:batchFetch`.
        BatchFetchBlocks = "BatchFetchBlocks",
        /// `POST /v1/datasets/{name}/vectors:batchFetch`.
        BatchFetchVectors = "BatchFetchVectors",
        /// `POST /v1/datasets/{name}/ranges:batchFetch`.
        BatchFetchRanges = "BatchFetchRanges",
        /// `POST /v1/datasets/{name}/objects:batchFetch`.
        BatchFetchObjects = "BatchFetchObjects",
        /// `POST /v1/datasets/{name}/vectors:score`.
        ScoreVectors = "ScoreVectors",
        /// `GET /metrics`.
        Metrics = "metrics",
        /// `GET /livez`.
        Livez = "livez",
        /// `GET /readyz`.
        Readyz = "readyz",
        /// `GET /openapi.json`.
        OpenApi = "openapi",
        /// `GET /v1/status`.
        GetStatus = "GetStatus",
        /// `GET /`.
        Page = "page",
        /// `GET /page/{asset}`.
        PageAsset = "page-asset",
        /// Anything else.
        Other = "other",
    }
}

/// `code` labels of gRPC, by the code's number (`google/rpc/code.proto`).
pub(super) const GRPC_CODES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

/// `code` labels of HTTP; the last is for all others.
pub(super) const HTTP_CODES: [&str; 27] = [
    "200", "204", "206", "301", "304", "308", "400", "401", "403", "404", "405", "406", "408", "411", "412",
    "413", "414", "415", "416", "421", "429", "499", "500", "501", "503", "504", "other",
];

/// Index of 499 in `HTTP_CODES`.
pub(super) const HTTP_CLIENT_LEFT: usize = 21;

/// The code's name in the `code` label: `OK`, `NOT_FOUND`, ...
pub fn grpc_code_name(code: tonic::Code) -> &'static str {
    GRPC_CODES[grpc_code_index(code)]
}

/// Whether every gRPC port has this service: health and reflection.
pub(crate) fn is_common_service(service: &str) -> bool {
    const SERVICES: [&str; 3] = [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    ];
    SERVICES.contains(&service)
}

/// The method at this path of a port that serves these services, besides health and reflection.
pub(crate) fn grpc_method_of(path: &str, services: &[&str]) -> GrpcMethod {
    let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.split_once('/')) else {
        return GrpcMethod::Other;
    };
    if !is_common_service(service) && !services.contains(&service) {
        return GrpcMethod::Other;
    }
    match (service, method) {
        ("ringfetch.v1.FetchService", "FetchBlocks") => GrpcMethod::FetchBlocks,
        ("ringfetch.v1.FetchService", "FetchVectors") => GrpcMethod::FetchVectors,
        ("ringfetch.v1.FetchService", "FetchRanges") => GrpcMethod::FetchRanges,
        ("ringfetch.v1.FetchService", "FetchObjects") => GrpcMethod::FetchObjects,
        ("ringfetch.v1.FetchService", "ScoreVectors") => GrpcMethod::ScoreVectors,
        ("ringfetch.v1.FetchService", "FetchStream") => GrpcMethod::FetchStream,
        ("ringfetch.v1.FetchService", "ReadObject") => GrpcMethod::ReadObject,
        ("ringfetch.v1.DatasetService", "ListDatasets") => GrpcMethod::ListDatasets,
        ("ringfetch.v1.DatasetService", "GetDataset") => GrpcMethod::GetDataset,
        ("ringfetch.v1.DatasetService", "ListObjects") => GrpcMethod::ListObjects,
        ("ringfetch.v1.AdminService", "GetStatus") => GrpcMethod::GetStatus,
        ("ringfetch.v1.AdminService", "SetLogLevel") => GrpcMethod::SetLogLevel,
        ("ringfetch.v1.AdminService", "SetBackend") => GrpcMethod::SetBackend,
        ("ringfetch.v1.AdminService", "ClearBackend") => GrpcMethod::ClearBackend,
        ("ringfetch.v1.AdminService", "Reload") => GrpcMethod::Reload,
        ("grpc.health.v1.Health", "Check") => GrpcMethod::HealthCheck,
        ("grpc.health.v1.Health", "Watch") => GrpcMethod::HealthWatch,
        (
            "grpc.reflection.v1.ServerReflection" | "grpc.reflection.v1alpha.ServerReflection",
            "ServerReflectionInfo",
        ) => GrpcMethod::ServerReflectionInfo,
        _ => GrpcMethod::Other,
    }
}

/// The status in the `code` label: `200`, ...
pub(crate) fn http_code_name(status: ::http::StatusCode) -> &'static str {
    HTTP_CODES[http_code_index(status)]
}

pub(super) fn grpc_code_index(code: tonic::Code) -> usize {
    usize::try_from(code as i32)
        .ok()
        .filter(|index| *index < GRPC_CODES.len())
        .unwrap_or(tonic::Code::Unknown as usize)
}

pub(super) fn http_code_index(status: ::http::StatusCode) -> usize {
    let status = status.as_str();
    HTTP_CODES
        .iter()
        .position(|code| *code == status)
        .unwrap_or(HTTP_CODES.len() - 1)
}
