//! The UCX library: loaded when a member first requests it, and kept until the process ends.

use super::ffi::{self, Functions, Handle, Params, Status};
use crate::error::{Error, Result};
use std::ffi::{CStr, CString, c_uint};
use std::path::Path;
use std::ptr::null;
use std::sync::{Mutex, PoisonError};

/// The oldest version that survives the loss of a member: older ones lose messages for good, or abort the process.
const OLDEST: (c_uint, c_uint) = (1, 16);
/// Makes all messages wait until there is memory for them.
const ALL_WAIT: (&CStr, &CStr) = (c"RNDV_THRESH", c"0");
/// Makes receivers read from senders' memory: so only they write into theirs, and not after they have cancelled.
const RECEIVERS_READ: (&CStr, &CStr) = (c"RNDV_SCHEME", c"get_zcopy");
/// Without RDMA only the process itself writes its memory. Messages would be cut into pieces and copied if receivers
/// had to read.
const AS_IS_FASTEST: (&CStr, &CStr) = (c"RNDV_SCHEME", c"auto");
/// The network cards of this machine that may have RDMA.
const CARDS: &str = "/sys/class/infiniband";

/// The library's functions and its context, which all workers of this process share.
pub(crate) struct Ucx {
    pub(super) call: Functions,
    pub(super) context: Handle,
}

// SAFETY: functions of a library that stays loaded, and a context made for workers of several threads.
unsafe impl Send for Ucx {}
// SAFETY: as above.
unsafe impl Sync for Ucx {}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Ucx").finish_non_exhaustive()
    }
}

impl Ucx {
    /// Opens the first suitable library of these names or paths, unless the process has one already.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there is none.
    pub(crate) fn open(libraries: &[String]) -> Result<&'static Self> {
        static OPENED: Mutex<Option<&'static Ucx>> = Mutex::new(None);
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(ucx) = *opened {
            return Ok(ucx);
        }
        let mut found = Vec::new();
        for name in libraries {
            match Self::load(name) {
                // It stays loaded: its hooks in the process cannot be removed.
                Ok(ucx) => return Ok(opened.insert(Box::leak(Box::new(ucx)))),
                Err(error) => found.push(format!("{name}: {error}")),
            }
        }
        let (major, minor) = OLDEST;
        Err(Error::invalid(format!(
            "transport: \"ucx\" needs UCX {major}.{minor} or newer, and found none ({}): install the system's \
             (libucx0, ucx), or the package libucx-cu12, or use transport \"tcp\"",
            found.join("; ")
        )))
    }

    fn load(name: &str) -> std::result::Result<Self, String> {
        let path = CString::new(name).map_err(|_| "expected a path without NUL".to_owned())?;
        // SAFETY: a C string; the library's initialisers are UCX's own.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: null, or a C string that is valid until this thread's next call.
            let error = unsafe { libc::dlerror().as_ref().map(|error| CStr::from_ptr(error)) };
            return Err(error.map_or("not found".into(), |error| error.to_string_lossy().into_owned()));
        }
        // SAFETY: the library is libucp, as it has these names, and is never closed.
        let call = unsafe { Functions::resolve(handle) }.map_err(|name| format!("it has no {name}"))?;
        let (mut major, mut minor, mut patch) = (0, 0, 0);
        // SAFETY: room for three numbers.
        unsafe { (call.ucp_get_version)(&raw mut major, &raw mut minor, &raw mut patch) };
        if (major, minor) < OLDEST || major != OLDEST.0 {
            return Err(format!("it is UCX {major}.{minor}.{patch}"));
        }
        let context = start(&call)?;
        Ok(Self { call, context })
    }

    /// Returns UCX's text for an error as an error.
    pub(super) fn check(&self, status: Status) -> std::io::Result<()> {
        if status < ffi::OK { Err(std::io::Error::other(explain(&self.call, status))) } else { Ok(()) }
    }
}

fn explain(call: &Functions, status: Status) -> String {
    // SAFETY: it returns a static C string for all numbers.
    let text = unsafe { CStr::from_ptr((call.ucs_status_string)(status)) };
    format!("UCX: {}", text.to_string_lossy())
}

/// Whether a port of some card is InfiniBand, or Ethernet with addresses for RoCE.
fn has_rdma(cards: &Path) -> bool {
    let below = |path: &Path| {
        std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let text = |path: &Path| std::fs::read_to_string(path).unwrap_or_default();
    below(cards).iter().flat_map(|card| below(&card.join("ports"))).any(|port| {
        match text(&port.join("link_layer")).trim() {
            "InfiniBand" => true,
            _ => below(&port.join("gid_attrs/types")).iter().any(|kind| text(kind).contains("RoCE")),
        }
    })
}

fn start(call: &Functions) -> std::result::Result<Handle, String> {
    let done = |status| if status == ffi::OK { Ok(()) } else { Err(explain(call, status)) };
    let mut config = std::ptr::null_mut();
    // SAFETY: no prefix and no file, and room for a handle.
    done(unsafe { (call.ucp_config_read)(null(), null(), &raw mut config) })?;
    let scheme = if has_rdma(Path::new(CARDS)) { RECEIVERS_READ } else { AS_IS_FASTEST };
    let set = [ALL_WAIT, scheme].into_iter().try_for_each(|(name, value)| {
        // SAFETY: a live configuration, and C strings.
        done(unsafe { (call.ucp_config_modify)(config, name.as_ptr(), value.as_ptr()) })
    });
    let params = Params::of_messages();
    let (mut context, (major, minor)) = (std::ptr::null_mut(), OLDEST);
    let started = set.and_then(|()| {
        // SAFETY: all arguments live through the call; the fields in the mask are set.
        done(unsafe { (call.ucp_init_version)(major, minor, &raw const params, config, &raw mut context) })
    });
    // SAFETY: it was read above, and is not used afterwards.
    unsafe { (call.ucp_config_release)(config) };
    started.map(|()| context)
}

#[cfg(test)]
mod tests {
    use super::has_rdma;
    use std::fs;

    #[test]
    fn a_card_of_ethernet_has_rdma_if_it_has_addresses_for_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let port = folder.path().join("mlx5_0/ports/1");
        fs::create_dir_all(port.join("gid_attrs/types")).expect("folders");
        assert!(!has_rdma(folder.path()));
        fs::write(port.join("link_layer"), "Ethernet\n").expect("a file");
        assert!(!has_rdma(folder.path()));
        fs::write(port.join("gid_attrs/types/0"), "RoCE v2\n").expect("a file");
        assert!(has_rdma(folder.path()));
        fs::remove_file(port.join("gid_attrs/types/0")).expect("the file");
        fs::write(port.join("link_layer"), "InfiniBand\n").expect("a file");
        assert!(has_rdma(folder.path()));
        assert!(!has_rdma(&folder.path().join("none")));
    }
}
