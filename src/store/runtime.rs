//! The threads that execute requests: two per process, started with the first store.

use crate::error::{Error, Result};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::{Builder, Handle, Runtime};

const THREADS: usize = 2;

/// The threads and the process that they belong to: a forked child has none of them.
static RUNTIME: Mutex<Option<(u32, Runtime)>> = Mutex::new(None);

/// Returns the process's threads for requests.
///
/// # Errors
/// [`Error::Io`] if they cannot be started.
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
    // A forked child cannot shut down its parent's runtime, as the threads do not exist in the child.
    std::mem::forget(found.replace((process, runtime)));
    Ok(handle)
}
