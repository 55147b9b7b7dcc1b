//! DatasetService: lists datasets and objects.

use super::convert;
use crate::caller::Connection;
use crate::error_status;
use crate::fetch::{Fetcher, PageRequest, RequestContext};
use crate::listener::TextBytes;
use prost::Message;
use ringfetch_proto::v1;
use ringfetch_proto::v1::dataset_service_server::DatasetService;
use tonic::{Request, Response, Status};

/// The service.
#[derive(Debug)]
pub(super) struct Datasets {
    pub(super) fetcher: Fetcher,
}

#[tonic::async_trait]
impl DatasetService for Datasets {
    async fn list_datasets(
        &self,
        request: Request<v1::ListDatasetsRequest>,
    ) -> Result<Response<v1::ListDatasetsResponse>, Status> {
        let connection = Connection::of(request.extensions());
        let asked = request.into_inner();
        let page = page(asked.page_size, asked.page_token);
        let listed = self.fetcher.list_datasets(&page, connection.as_ref());
        let (datasets, next) = listed.map_err(|error| error_status::to_status(&error, "page_token"))?;
        Ok(listed_response(v1::ListDatasetsResponse {
            datasets: datasets.into_iter().map(convert::dataset).collect(),
            next_page_token: next.unwrap_or_default(),
        }))
    }

    async fn get_dataset(
        &self,
        request: Request<v1::GetDatasetRequest>,
    ) -> Result<Response<v1::GetDatasetResponse>, Status> {
        let connection = Connection::of(request.extensions());
        let described = self
            .fetcher
            .describe(&request.get_ref().name, connection.as_ref());
        let described = described.map_err(|error| error_status::to_status_naming(&error, "name"))?;
        Ok(Response::new(v1::GetDatasetResponse {
            dataset: Some(convert::dataset(described)),
        }))
    }

    async fn list_objects(
        &self,
        request: Request<v1::ListObjectsRequest>,
    ) -> Result<Response<v1::ListObjectsResponse>, Status> {
        let context = RequestContext {
            connection: Connection::of(request.extensions()),
            ..RequestContext::default()
        };
        let asked = request.into_inner();
        let page = page(asked.page_size, asked.page_token);
        let listed = self.fetcher.list_objects(&asked.dataset, page, context);
        let page = listed
            .await
            .map_err(|error| error_status::to_status(&error, "dataset"))?;
        let object = |(name, length_bytes)| v1::ObjectInfo { name, length_bytes };
        Ok(listed_response(v1::ListObjectsResponse {
            objects: page.objects.into_iter().map(object).collect(),
            next_page_token: page.next_page_token.unwrap_or_default(),
        }))
    }
}

fn page(size: u32, token: String) -> PageRequest {
    PageRequest { size, token }
}

/// A list as a response that tells its length, since tonic encodes it only when the client reads it.
fn listed_response<M: Message>(list: M) -> Response<M> {
    let text_bytes = TextBytes(u64::try_from(list.encoded_len()).unwrap_or(u64::MAX));
    let mut response = Response::new(list);
    response.extensions_mut().insert(text_bytes);
    response
}
