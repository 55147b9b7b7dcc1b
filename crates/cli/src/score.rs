//! `ringfetch score`: the vectors nearest to a query, ranked by the daemon.

use crate::args::Global;
use crate::daemon::{client, grpc_failure};
use crate::outcome::Failure;
use crate::sink;
use crate::table::Table;
use clap::{ArgGroup, Args, ValueEnum};
use ringfetch_client::{Client, Metric, Ranking, ScoreRequest};
use serde_json::json;
use std::io::Write as _;

#[derive(Debug, Args)]
#[command(group(ArgGroup::new("of").required(true).args(["query", "like"])))]
pub(crate) struct Score {
    /// Name of a dataset of kind vectors.
    dataset: String,
    /// The candidates, from 0.
    #[arg(required = true, value_name = "ID")]
    ids: Vec<u64>,
    /// The query: its elements, with commas between them.
    #[arg(
        long,
        value_name = "X,Y,...",
        value_delimiter = ',',
        allow_hyphen_values = true
    )]
    query: Vec<f32>,
    /// Use the vector with this id as the query.
    #[arg(long, value_name = "ID")]
    like: Option<u64>,
    /// Distance or similarity measure.
    #[arg(long, value_enum, default_value = "dot")]
    metric: MetricName,
    /// Most results; default: all.
    #[arg(long)]
    limit: Option<u32>,
    /// Only results with this score or a better one.
    #[arg(long, allow_hyphen_values = true)]
    threshold: Option<f64>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum MetricName {
    /// Inner product; larger is better.
    Dot,
    /// Cosine of the angle; larger is better.
    Cosine,
    /// Euclidean distance; smaller is better.
    Euclidean,
    /// Sum of absolute differences; smaller is better.
    Manhattan,
}

impl From<MetricName> for Metric {
    fn from(name: MetricName) -> Self {
        match name {
            MetricName::Dot => Self::Dot,
            MetricName::Cosine => Self::Cosine,
            MetricName::Euclidean => Self::Euclidean,
            MetricName::Manhattan => Self::Manhattan,
        }
    }
}

pub(crate) async fn run(global: &Global, score: &Score) -> Result<(), Failure> {
    let client = client(global)?;
    let query = match score.like {
        Some(id) => vector(&client, global, &score.dataset, id).await?,
        None => score.query.clone(),
    };
    let all = u32::try_from(score.ids.len()).unwrap_or(u32::MAX);
    let limit = score.limit.unwrap_or(all);
    let mut request =
        ScoreRequest::new(&score.dataset, score.metric.into(), limit).query(query, score.ids.as_slice());
    if let Some(threshold) = score.threshold {
        request = request.threshold(threshold);
    }
    let scores = client
        .score_vectors(request)
        .await
        .map_err(grpc_failure(global))?;
    let ranking = scores.results.first();
    let ranking = ranking.ok_or_else(|| Failure::Failed("the response has no result".to_owned()))?;
    sink::print(global.json, &as_json(ranking, &scores.etag), |out| {
        let mut table = Table::new(&[0, 1]);
        table.row(["ID", "SCORE"]);
        for (id, score) in &ranking.best {
            table.row([id.to_string(), score.to_string()]);
        }
        table.write(out)?;
        match ranking.unscored {
            0 => Ok(()),
            unscored => writeln!(out, "{unscored} without a finite score"),
        }
    })?;
    match ranking.errors.first() {
        None => Ok(()),
        Some(first) => Err(Failure::Failed(format!(
            "{} of {} candidates could not be read; {first}",
            ranking.errors.len(),
            score.ids.len()
        ))),
    }
}

fn as_json(ranking: &Ranking, etag: &str) -> serde_json::Value {
    let best = ranking.best.iter();
    let errors = ranking.errors.iter();
    json!({
        "best": best.map(|(id, score)| json!({ "id": id, "score": score })).collect::<Vec<_>>(),
        "unscored": ranking.unscored,
        "errors": errors
            .map(|error| json!({ "item": error.item, "code": error.label(), "message": error.message }))
            .collect::<Vec<_>>(),
        "etag": etag,
    })
}

/// A vector of the dataset, for use as a query.
async fn vector(client: &Client, global: &Global, dataset: &str, id: u64) -> Result<Vec<f32>, Failure> {
    let vectors = client
        .fetch_vectors(dataset, &[id])
        .await
        .map_err(grpc_failure(global))?;
    match vectors.get(0) {
        Ok(_) => Ok(vectors.as_f32(0).unwrap_or_default()),
        Err(error) => Err(Failure::Failed(format!("--like: {}", error.message))),
    }
}
