//! DatasetService: what is served, and what a directory holds.
//!
//! Listing walks a directory on the blocking pool, a few walks at a time: one client's listings must not take the
//! threads that open objects. A page ends at its size or at a bound of bytes, whichever comes first.

use super::describe;
use crate::fetch::{FetchError, Fetcher, WALKS_MAX};
use crate::status;
use ringfetch_engine::dataset::{Kind, ObjectEntry};
use ringfetch_proto::v1;
use ringfetch_proto::v1::dataset_service_server::DatasetService;
use tonic::{Request, Response, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

/// Names on one page, at most: what the contract says.
const PAGE_NAMES_MAX: usize = 1000;
/// Bytes of names on one page, at most: clients refuse messages of more than 4 MiB by default, and a name can have
/// 4 KiB.
const PAGE_BYTES_MAX: usize = 1 << 20;

/// The service.
#[derive(Debug)]
pub(super) struct Datasets {
    fetcher: Fetcher,
}

impl Datasets {
    pub(super) fn new(fetcher: Fetcher) -> Self {
        Self { fetcher }
    }
}

#[tonic::async_trait]
impl DatasetService for Datasets {
    async fn list_datasets(
        &self,
        _: Request<v1::ListDatasetsRequest>,
    ) -> Result<Response<v1::ListDatasetsResponse>, Status> {
        let datasets = self
            .fetcher
            .datasets()
            .iter()
            .map(|dataset| describe::dataset(dataset, &self.fetcher.backend_of(dataset)))
            .collect();
        Ok(Response::new(v1::ListDatasetsResponse { datasets }))
    }

    async fn get_dataset(
        &self,
        request: Request<v1::GetDatasetRequest>,
    ) -> Result<Response<v1::GetDatasetResponse>, Status> {
        let dataset = self
            .fetcher
            .dataset(&request.get_ref().name)
            .map_err(|error| status::to_status(&error, "name"))?;
        let dataset = Some(describe::dataset(&dataset, &self.fetcher.backend_of(&dataset)));
        Ok(Response::new(v1::GetDatasetResponse { dataset }))
    }

    async fn list_objects(
        &self,
        request: Request<v1::ListObjectsRequest>,
    ) -> Result<Response<v1::ListObjectsResponse>, Status> {
        let request = request.into_inner();
        let to_status = |error: FetchError| status::to_status(&error, "dataset");
        let dataset = self.fetcher.dataset(&request.dataset).map_err(to_status)?;
        let kind = match dataset.kind() {
            Kind::Objects => None,
            Kind::Blocks { .. } => Some("blocks"),
            Kind::Vectors { .. } => Some("vectors"),
        };
        if let Some(kind) = kind {
            let remedy = "GetDataset, whose count says which items there are";
            return Err(to_status(FetchError::WrongKind {
                name: request.dataset,
                kind,
                remedy,
            }));
        }
        let Some(permit) = self.fetcher.try_walk() else {
            let message =
                format!("overloaded: {WALKS_MAX} directories are being listed; retry after a moment");
            let details = ErrorDetails::with_retry_info(Some(std::time::Duration::from_millis(200)));
            return Err(Status::with_error_details(
                tonic::Code::ResourceExhausted,
                message,
                details,
            ));
        };
        let names = page_names(request.page_size);
        let walk = tokio::task::spawn_blocking(move || {
            // The permit is given back when the walk is over, not when the caller gives up.
            let _permit = permit;
            dataset.list_objects(&request.page_token, names + 1)
        });
        let entries = walk
            .await
            .map_err(|error| Status::internal(format!("listing failed: {error}")))?
            .map_err(|error| {
                Status::internal(format!("the dataset's directory cannot be listed: {error}"))
            })?;
        Ok(Response::new(page(entries, names)))
    }
}

fn page_names(page_size: u32) -> usize {
    match page_size as usize {
        0 => PAGE_NAMES_MAX,
        size => size.min(PAGE_NAMES_MAX),
    }
}

/// The page that begins with these entries. There is another one after it if they do not all fit.
fn page(entries: Vec<ObjectEntry>, names: usize) -> v1::ListObjectsResponse {
    let found = entries.len();
    let mut bytes = 0;
    let mut objects = Vec::with_capacity(found.min(names));
    for entry in entries.into_iter().take(names) {
        bytes += entry.name.len();
        if bytes > PAGE_BYTES_MAX && !objects.is_empty() {
            break;
        }
        objects.push(v1::ObjectInfo {
            name: entry.name,
            length_bytes: entry.length_bytes,
        });
    }
    let next_page_token = match objects.last() {
        Some(last) if objects.len() < found => last.name.clone(),
        Some(_) | None => String::new(),
    };
    v1::ListObjectsResponse {
        objects,
        next_page_token,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(count: usize, name_bytes: usize) -> Vec<ObjectEntry> {
        let name = |number| format!("{number:0name_bytes$}");
        (0..count)
            .map(|number| ObjectEntry {
                name: name(number),
                length_bytes: 1,
            })
            .collect()
    }

    #[test]
    fn a_page_ends_with_a_token_where_more_follows() {
        // One entry more than fits: the token is the last name shown. As many as fit, or none: no token.
        let more = page(entries(4, 2), 3);
        assert_eq!((more.objects.len(), more.next_page_token.as_str()), (3, "02"));
        let all = page(entries(3, 2), 3);
        assert_eq!((all.objects.len(), all.next_page_token.as_str()), (3, ""));
        assert_eq!(page(Vec::new(), 3), v1::ListObjectsResponse::default());
    }

    #[test]
    fn a_page_of_long_names_stays_below_what_clients_take() {
        // A thousand names of 4 KiB: the page ends at 1 MiB of names and goes on after the last one shown.
        let long = page(entries(1000, 4096), 1000);
        assert_eq!(long.objects.len(), 256);
        assert_eq!(long.next_page_token, long.objects[255].name);
    }

    #[test]
    fn page_sizes_are_bounded() {
        // 0 means the most, and no more than that is given.
        assert_eq!([0, 7, 1000, u32::MAX].map(page_names), [1000, 7, 1000, 1000]);
    }
}
