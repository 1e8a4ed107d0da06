//! The threads that carry out requests: two for the process, started at the first place.

use crate::error::{Error, Result};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::{Builder, Handle, Runtime};

const THREADS: usize = 2;

/// The threads, and the process that they are of: a child that was forked has none of them.
static RUNTIME: Mutex<Option<(u32, Runtime)>> = Mutex::new(None);

/// The process's threads for requests.
///
/// # Errors
/// [`Error::Io`] when they cannot be started.
pub(super) fn handle() -> Result<Handle> {
    let mut found = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if let Some((owner, runtime)) = found.as_ref()
        && *owner == process
    {
        return Ok(runtime.handle().clone());
    }
    let mut builder = Builder::new_multi_thread();
    builder.worker_threads(THREADS).thread_name("evermoe-store").enable_all();
    let runtime = builder.build().map_err(|error| Error::io("threads for requests", error))?;
    let handle = runtime.handle().clone();
    // What a forked child has of its parent's cannot be shut down: the threads are not there.
    std::mem::forget(found.replace((process, runtime)));
    Ok(handle)
}
