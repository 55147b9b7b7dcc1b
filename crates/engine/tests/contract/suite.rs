//! Tests as values: cases by variant, each with what it needs of the host, for a harness that can ignore a
//! test at run time.

use crate::harness::{Case, Harness, VARIANTS, Variant};
use crate::needs::Need;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// A test with its name and what it needs of the host.
pub(crate) struct Test {
    name: String,
    needs: Vec<Need>,
    run: Box<dyn FnOnce() + Send>,
}

impl Test {
    pub(crate) fn new(name: String, needs: Vec<Need>, run: impl FnOnce() + Send + 'static) -> Self {
        Self {
            name,
            needs,
            run: Box::new(run),
        }
    }

    /// The test under these arguments. If something is missing, it is ignored, with the reason; if the
    /// arguments ask for ignored tests, it fails instead, so that a run meant to leave nothing out cannot do
    /// so silently.
    pub(crate) fn into_trial(self, arguments: &Arguments) -> Trial {
        let Self { name, needs, run } = self;
        let demanded = arguments.ignored || arguments.include_ignored;
        // `--ignored` selects by this flag. Otherwise needs are examined only when the test runs, since the
        // reason is printed only then.
        let is_ignored = demanded && missing(&needs).is_some();
        let thread_name = name.clone();
        let trial = Trial::ignorable_test(name, move || match missing(&needs) {
            Some(reason) if demanded => Err(Failed::from(reason)),
            Some(reason) => Ok(Completion::ignored_with(reason)),
            None => {
                run_named(thread_name, run);
                Ok(Completion::Completed)
            }
        });
        trial.with_ignored_flag(is_ignored)
    }
}

fn missing(needs: &[Need]) -> Option<String> {
    needs.iter().find_map(|need| need.missing())
}

/// Runs a test on a thread of its name, so that panic messages show it.
fn run_named(name: String, run: Box<dyn FnOnce() + Send>) {
    let thread = std::thread::Builder::new().name(name).spawn(run);
    if let Err(panic) = thread.expect("a thread").join() {
        std::panic::resume_unwind(panic);
    }
}

/// Every case on every variant.
pub(crate) fn on_every_variant(module: &str, cases: &[Case]) -> Vec<Test> {
    let of_variant = |variant: &'static Variant| {
        cases.iter().map(move |&(case, run)| {
            let name = format!("{module}::{}::{case}", variant.name);
            Test::new(name, variant.needs(), move || Harness::run(variant, run))
        })
    };
    VARIANTS.iter().flat_map(of_variant).collect()
}

/// Tests of the simulation, which need nothing.
pub(crate) fn simulated(module: &str, tests: &[(&str, fn())]) -> Vec<Test> {
    let tests = tests.iter();
    tests
        .map(|&(name, run)| Test::new(format!("{module}::{name}"), Vec::new(), run))
        .collect()
}
