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

    /// The test under these arguments. If it needs more than what is common, or that is missing, it is
    /// ignored, with the reason. If the arguments ask for ignored tests, it runs, and fails if something is
    /// missing, so that a run meant to leave nothing out cannot do so silently.
    pub(crate) fn into_trial(self, arguments: &Arguments) -> Trial {
        let Self { name, needs, run } = self;
        let demanded = arguments.ignored || arguments.include_ignored;
        let special = needs.iter().copied().find(|need| !need.is_common());
        // `--ignored` selects by this flag. Otherwise the trial decides, since only then a reason is printed.
        let is_ignored = demanded && (special.is_some() || missing(&needs).is_some());
        let thread_name = name.clone();
        let trial = Trial::ignorable_test(name, move || {
            if let (false, Some(need)) = (demanded, special) {
                return Ok(Completion::ignored_with(format!("needs {}", need.name())));
            }
            match missing(&needs) {
                Some(reason) if demanded => Err(Failed::from(reason)),
                Some(reason) => Ok(Completion::ignored_with(reason)),
                None => {
                    run_named(thread_name, run);
                    Ok(Completion::Completed)
                }
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
