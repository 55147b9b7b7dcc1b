//! `ringfetch lab`: runs the studies of ringfetch-lab; Ctrl-C, SIGTERM and SIGHUP stop them, twice at once.

use crate::args::Global;
use crate::backend::LOOK;
use crate::daemon;
use crate::outcome::Failure;
use crate::sink::Sink;
use crate::stop::StopSignals;
use ringfetch_lab::{Clients, Context, Lab, LabCommand, LabError};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(crate) async fn run(global: &Global, command: LabCommand) -> Result<(), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let line: Vec<String> = std::env::args_os()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let clients = daemon::builders(global)?;
    let context = Context {
        stop: Arc::clone(&stop),
        json: global.json,
        clients: Clients::new(clients),
        admin: global.admin.clone(),
        command_line: shlex::try_join(line.iter().map(String::as_str)).unwrap_or_else(|_| line.join(" ")),
    };
    let signals = StopSignals::catch()?;
    let switches = matches!(command, LabCommand::Flip(_));
    let lab = Lab { command };
    let study = tokio::task::spawn_blocking(move || {
        let mut out = Sink::open(None)?;
        let ended = ringfetch_lab::run(&lab, &context, &mut out);
        out.finish()?;
        ended.map_err(|error| match error {
            LabError::Usage(problem) => Failure::Usage(problem),
            LabError::Refused(problem) | LabError::Failed(problem) => Failure::Failed(problem),
        })
    });
    let ended = signals.end_in_order(study, &stop).await;
    ended.map_err(|failure| match failure {
        // It was not put back.
        Failure::Failed(problem) if switches => Failure::Failed(format!(
            "{problem}; the daemon may have another backend now: {LOOK}"
        )),
        failure @ (Failure::Usage(_) | Failure::Failed(_) | Failure::Condition(_)) => failure,
    })?
}
