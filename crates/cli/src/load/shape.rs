//! What a workload must know of a dataset, asked for at the port that its requests go to: only that one need be
//! reachable.

use super::args::TransportArg;
use super::transport::{Endpoints, encode, get_text};
use super::workload::OBJECTS_MAX;
use crate::args::Global;
use crate::daemon::grpc_failure;
use crate::outcome::Failure;
use futures_util::{StreamExt as _, TryStreamExt as _};
use ringfetch_client::{Client, Dtype};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A dataset, as HTTP describes it.
#[derive(Debug, Deserialize)]
pub(super) struct Shape {
    pub(super) kind: String,
    pub(super) length_bytes: u64,
    /// Blocks or vectors.
    pub(super) count: u64,
    #[serde(default)]
    pub(super) block_bytes: u32,
    pub(super) vectors: Option<VectorShape>,
}

#[derive(Debug, Deserialize)]
pub(super) struct VectorShape {
    pub(super) dim: u32,
    dtype: String,
}

impl VectorShape {
    /// `None`: one that is unknown here.
    pub(super) fn dtype(&self) -> Option<Dtype> {
        let mut known = (0..64).filter_map(Dtype::from_wire);
        known.find(|dtype| dtype.as_str() == self.dtype)
    }
}

#[derive(Deserialize)]
struct Page {
    objects: Vec<Object>,
    next_page_token: Option<String>,
}

#[derive(Deserialize)]
struct Object {
    name: String,
}

/// Describes datasets over the transport of the load.
pub(super) struct Describer<'a> {
    pub(super) client: &'a Client,
    pub(super) global: &'a Global,
    pub(super) endpoints: &'a Endpoints,
}

impl Describer<'_> {
    pub(super) async fn shape(&self, dataset: &str) -> Result<Shape, Failure> {
        if self.endpoints.transport == TransportArg::Http {
            return self.get(&path(dataset)).await;
        }
        let found = self.client.get_dataset(dataset).await;
        // As JSON it has the same fields.
        let json = serde_json::to_value(found.map_err(grpc_failure(self.global))?)?;
        Ok(serde_json::from_value(json)?)
    }

    /// The names of its objects, at most [`OBJECTS_MAX`].
    pub(super) async fn names(&self, dataset: &str) -> Result<Vec<String>, Failure> {
        if self.endpoints.transport != TransportArg::Http {
            let listed = self.client.list_objects(dataset).take(OBJECTS_MAX);
            let names = listed.map_ok(|object| object.name).try_collect().await;
            return names.map_err(grpc_failure(self.global));
        }
        let (mut names, mut query, mut this) = (Vec::new(), String::new(), String::new());
        loop {
            let path = format!("{}/objects{query}", path(dataset));
            let page: Page = self.get(&path).await?;
            names.extend(page.objects.into_iter().map(|object| object.name));
            match page.next_page_token {
                // Otherwise the list would have no end. The first page has an empty token.
                Some(token) if token == this => {
                    let url = &self.endpoints.http;
                    let problem = format!("{url}{path}: a page of objects names itself as the next one");
                    return Err(Failure::Failed(problem));
                }
                Some(token) if names.len() < OBJECTS_MAX => {
                    "?page_token=".clone_into(&mut query);
                    encode(&token, &mut query);
                    this = token;
                }
                Some(_) | None => {
                    names.truncate(OBJECTS_MAX);
                    return Ok(names);
                }
            }
        }
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        let (url, credentials) = (&self.endpoints.http, &self.endpoints.credentials);
        let text = get_text(url, credentials, path, self.endpoints.timeout).await;
        let text = text.map_err(|refused| match &*refused.label {
            "TRANSPORT" => self.endpoints.unreachable(&refused),
            _ => Failure::Failed(format!("{url}{path}: {}", refused.message)),
        })?;
        let foreign = |error| Failure::Failed(format!("{url}{path} is not the daemon's: {error}"));
        serde_json::from_str(&text).map_err(foreign)
    }
}

fn path(dataset: &str) -> String {
    let mut path = "/v1/datasets/".to_owned();
    encode(dataset, &mut path);
    path
}
