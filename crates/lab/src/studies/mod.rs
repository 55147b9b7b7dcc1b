//! The studies: for each its axes, its strategies, and what its figures mean.

pub(crate) mod act;
pub(crate) mod block_size;
pub(crate) mod calibrate;
pub(crate) mod flip;
pub(crate) mod objects;
pub(crate) mod rescore;
pub(crate) mod strategies;

use crate::error::LabError;
use crate::quantity::exact_size;
use crate::strategies::{ALL, Strategy, named};

/// The strategies of these names, or of `--only`.
fn chosen(names: &[&str], only: &[String]) -> Result<Vec<&'static Strategy>, LabError> {
    if let Some(wrong) = only.iter().find(|name| !names.contains(&name.as_str())) {
        let problem = format!("--only: {wrong}: this study has {}", names.join(", "));
        return Err(LabError::Usage(problem));
    }
    let wanted = |name: &str| only.is_empty() || only.iter().any(|only| only == name);
    let known = ALL.iter().map(|strategy| strategy.name);
    Ok(known
        .filter(|name| names.contains(name) && wanted(name))
        .filter_map(named)
        .collect())
}

fn list<T: ToString>(values: &[T]) -> String {
    let values: Vec<String> = values.iter().map(T::to_string).collect();
    values.join(", ")
}

fn sizes_shown(bytes: &[u64]) -> String {
    let shown: Vec<String> = bytes.iter().copied().map(exact_size).collect();
    list(&shown)
}

fn pair(name: &str, value: impl ToString) -> (String, String) {
    (name.to_owned(), value.to_string())
}
