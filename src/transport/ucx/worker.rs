//! A UCX worker at one end of a connection, used by a single thread.
//!
//! Workers and listeners are kept for later connections and not destroyed: UCX aborts the process if another member
//! connects to one that is being destroyed, and members may be lost at any time.

use super::address::{from_c, to_c};
use super::ffi::{
    self, EpParams, Handle, ListenerAttr, ListenerParams, RequestParam, Status, StatusOrRequest, TagInfo,
    WorkerParams,
};
use super::library::Ucx;
use std::ffi::{c_int, c_void};
use std::io::{Error, ErrorKind, Result};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum sleep between two checks; events wake the thread earlier.
const SLEEP: Duration = Duration::from_millis(500);
/// Time to wait for the end of cancelled operations.
const LAST_LOOKS: Duration = Duration::from_millis(500);

/// Workers that no connection of this process uses.
static IDLE: Mutex<Vec<Reusable>> = Mutex::new(Vec::new());

/// The reusable parts of a worker.
#[derive(Clone, Copy, Debug)]
struct Reusable {
    handle: Handle,
    /// Becomes readable when the worker has work.
    wake: c_int,
    /// Listener that other workers connect to; none for a sending worker.
    listener: Option<Listener>,
}

// SAFETY: one thread uses them at a time, as the worker's thread mode requires.
unsafe impl Send for Reusable {}

#[derive(Clone, Copy, Debug)]
struct Listener {
    address: SocketAddr,
    newcomers: &'static Newcomers,
}

/// Addresses of the connection requests that have no endpoint yet.
type Newcomers = Mutex<Vec<usize>>;

/// A worker and its single message in progress.
pub(super) struct Worker {
    ucx: &'static Ucx,
    parts: Reusable,
    /// The other side; for a listening worker, all sides that have connected.
    endpoints: Vec<Handle>,
    /// The request in progress; null without one.
    request: *mut c_void,
    is_receive: bool,
}

// SAFETY: as for its parts.
unsafe impl Send for Worker {}

unsafe extern "C" fn welcome(request: Handle, newcomers: *mut c_void) {
    // SAFETY: the listener's argument, which is never freed.
    let newcomers = unsafe { &*newcomers.cast::<Newcomers>() };
    newcomers.lock().unwrap_or_else(PoisonError::into_inner).push(request.expose_provenance());
}

/// Ignores the failure of an endpoint: its request in progress reports the same.
unsafe extern "C" fn ignore(_argument: *mut c_void, _endpoint: Handle, _status: Status) {}

impl Worker {
    /// Creates a worker that connects to another, and sends.
    pub(super) fn to(ucx: &'static Ucx, address: SocketAddr) -> Result<Self> {
        let parts = Reusable::idle(|parts| parts.listener.is_none());
        let mut worker = Self::of(ucx, parts.map_or_else(|| Reusable::new(ucx), Ok)?);
        let address = to_c(address);
        worker.connect(&EpParams::to(&address, ignore))?;
        Ok(worker)
    }

    /// Creates a worker that listens at an address of this machine, and receives.
    pub(super) fn at(ucx: &'static Ucx, ip: IpAddr) -> Result<Self> {
        let is_at = |parts: &Reusable| parts.listener.is_some_and(|listener| listener.address.ip() == ip);
        let parts = Reusable::idle(is_at).map_or_else(|| Reusable::new(ucx)?.listen(ucx, ip), Ok)?;
        Ok(Self::of(ucx, parts))
    }

    fn of(ucx: &'static Ucx, parts: Reusable) -> Self {
        Self { ucx, parts, endpoints: Vec::new(), request: null_mut(), is_receive: false }
    }

    /// Returns the address that others connect to.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.parts.listener.map(|listener| listener.address)
    }

    /// Creates an endpoint; the address in `params` lives through the call.
    fn connect(&mut self, params: &EpParams) -> Result<()> {
        let mut endpoint = null_mut();
        // SAFETY: a live worker; the fields in the mask are set.
        let made = unsafe {
            (self.ucx.call.ucp_ep_create)(self.parts.handle, &raw const *params, &raw mut endpoint)
        };
        self.ucx.check(made)?;
        // Null without an error, for a side that has connected and disappeared.
        if !endpoint.is_null() {
            self.endpoints.push(endpoint);
        }
        Ok(())
    }

    /// Creates endpoints for the sides that have connected.
    fn take_in(&mut self) {
        let Some(listener) = self.parts.listener else { return };
        let all = std::mem::take(&mut *listener.newcomers.lock().unwrap_or_else(PoisonError::into_inner));
        for request in all {
            let request = std::ptr::with_exposed_provenance_mut(request);
            // An error means that the side has disappeared, or was not this connection's. In the first case its sender
            // ends the connection.
            let _taken = self.connect(&EpParams::back(request, ignore));
        }
    }

    /// Begins to send to the connected worker.
    ///
    /// # Safety
    /// The memory must not change until `wait` has returned or the worker is dropped.
    pub(super) unsafe fn send(&mut self, bytes: &[u8], tag: u64) -> Result<()> {
        let (param, nbytes) = (RequestParam::of_host_memory(), bytes.len());
        let endpoint = *self.endpoints.first().ok_or(ErrorKind::NotConnected)?;
        let send = self.ucx.call.ucp_tag_send_nbx;
        // SAFETY: a live endpoint; the bytes live by the caller's promise.
        let begun = unsafe { send(endpoint, bytes.as_ptr().cast(), nbytes, tag, &raw const param) };
        self.begin(begun, false)
    }

    /// Begins to receive a message.
    ///
    /// # Safety
    /// Nothing else may read or write the memory until `wait` has returned or the worker is dropped.
    pub(super) unsafe fn receive(&mut self, room: &mut [u8], tag: u64) -> Result<()> {
        let (param, nbytes) = (RequestParam::of_host_memory(), room.len());
        let (receive, worker) = (self.ucx.call.ucp_tag_recv_nbx, self.parts.handle);
        // SAFETY: a live worker; the memory is exclusive by the caller's promise.
        let begun =
            unsafe { receive(worker, room.as_mut_ptr().cast(), nbytes, tag, u64::MAX, &raw const param) };
        self.begin(begun, true)
    }

    fn begin(&mut self, begun: StatusOrRequest, is_receive: bool) -> Result<()> {
        self.request = self.request_of(begun)?;
        self.is_receive = is_receive;
        Ok(())
    }

    /// Returns the request, null if it has completed, or the error.
    fn request_of(&self, begun: StatusOrRequest) -> Result<*mut c_void> {
        let number = begun.addr().cast_signed();
        if (ffi::LAST_ERROR..0).contains(&number) {
            self.ucx.check(Status::try_from(number).unwrap_or(Status::MIN))?;
        }
        Ok(begun)
    }

    /// Waits until the operation completes; returns the length of a received message. Fails when UCX fails, and when
    /// the TCP connection ends.
    pub(super) fn wait(&mut self, stream: &TcpStream) -> Result<usize> {
        let mut has_ended = false;
        loop {
            while self.progress() {}
            self.take_in();
            if let Some((status, nbytes)) = self.over() {
                self.free();
                return self.ucx.check(status).map(|()| nbytes);
            }
            // Completions before the connection's end were checked once more.
            if has_ended {
                return Err(ErrorKind::ConnectionReset.into());
            }
            // SAFETY: a live worker.
            let armed = unsafe { (self.ucx.call.ucp_worker_arm)(self.parts.handle) };
            if armed != ffi::BUSY {
                self.ucx.check(armed)?;
                has_ended = self.sleep(stream)?;
            }
        }
    }

    /// Makes progress; returns whether there was any.
    fn progress(&self) -> bool {
        // SAFETY: a live worker, used by this thread only.
        unsafe { (self.ucx.call.ucp_worker_progress)(self.parts.handle) != 0 }
    }

    /// Status of the completed operation, and the length of a received message; none while it is in progress.
    fn over(&self) -> Option<(Status, usize)> {
        let mut info = TagInfo::default();
        let call = &self.ucx.call;
        // SAFETY: a request that was not freed, of the right kind for the function, and memory for the result.
        let status = unsafe {
            match (self.request.is_null(), self.is_receive) {
                (true, _) => ffi::OK,
                (_, true) => (call.ucp_tag_recv_request_test)(self.request, &raw mut info),
                (_, false) => (call.ucp_request_check_status)(self.request),
            }
        };
        (status != ffi::IN_PROGRESS).then_some((status, info.length))
    }

    /// Returns the request to UCX.
    fn free(&mut self) {
        let request = std::mem::replace(&mut self.request, null_mut());
        if !request.is_null() {
            // SAFETY: it was not freed, and is not used again.
            unsafe { (self.ucx.call.ucp_request_free)(request) };
        }
    }

    /// Sleeps until there is an event; returns whether the connection has ended.
    fn sleep(&self, stream: &TcpStream) -> Result<bool> {
        let wait = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut polls = [wait(self.parts.wake, libc::POLLIN), wait(stream.as_raw_fd(), libc::POLLRDHUP)];
        let milliseconds = c_int::try_from(SLEEP.as_millis()).unwrap_or(c_int::MAX);
        // SAFETY: two entries, which live through the call.
        let result = unsafe { libc::poll(polls.as_mut_ptr(), 2, milliseconds) };
        if result < 0 && Error::last_os_error().kind() != ErrorKind::Interrupted {
            return Err(Error::last_os_error());
        }
        Ok(polls[1].revents != 0)
    }

    /// Closes all endpoints without waiting for the other sides; returns the requests to wait for.
    fn close(&mut self) -> Vec<*mut c_void> {
        let (close, param) = (self.ucx.call.ucp_ep_close_nbx, RequestParam::by_force());
        let mut closing = Vec::new();
        for endpoint in std::mem::take(&mut self.endpoints) {
            // SAFETY: a live endpoint, which is not used afterwards. An endpoint that cannot be closed leaves nothing
            // behind.
            let begun = self.request_of(unsafe { close(endpoint, &raw const param) });
            closing.extend(begun.ok());
        }
        let param = RequestParam::default();
        // SAFETY: a live worker. The flush completes once the queues of all closed endpoints have.
        let begun = unsafe { (self.ucx.call.ucp_worker_flush_nbx)(self.parts.handle, &raw const param) };
        closing.extend(self.request_of(begun).ok());
        closing.retain(|request| !request.is_null());
        closing
    }
}

impl Drop for Worker {
    /// Cancels the operation in progress: when this returns, it no longer touches memory.
    ///
    /// Bytes move only in `progress`, or by queues of the network, which end with the endpoints. UCX may drop a message
    /// of which some pieces have arrived; then `progress` is not called again. Queues that do not end otherwise end
    /// with the worker.
    fn drop(&mut self) {
        let (ucx, deadline) = (self.ucx, Instant::now() + LAST_LOOKS);
        let closing = self.close();
        if self.is_receive && !self.request.is_null() {
            // SAFETY: a live worker and its request.
            unsafe { (ucx.call.ucp_request_cancel)(self.parts.handle, self.request) };
        }
        let closes = |request: &*mut c_void| {
            // SAFETY: a request that was not freed.
            unsafe { (ucx.call.ucp_request_check_status)(*request) == ffi::IN_PROGRESS }
        };
        while (self.over().is_none() || closing.iter().any(closes)) && Instant::now() < deadline {
            if !self.progress() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let (is_over, is_closed) = (self.over().is_some(), !closing.iter().any(closes));
        self.free();
        for request in closing {
            // SAFETY: it was not freed, and is not used again.
            unsafe { (ucx.call.ucp_request_free)(request) };
        }
        if is_over && is_closed {
            self.parts.keep();
        } else if !is_closed {
            // SAFETY: a live worker, which is not used afterwards.
            unsafe { (ucx.call.ucp_worker_destroy)(self.parts.handle) };
        }
    }
}

impl Reusable {
    /// Returns suitable parts of an idle worker.
    fn idle(fits: impl Fn(&Self) -> bool) -> Option<Self> {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        let place = idle.iter().position(fits)?;
        Some(idle.swap_remove(place))
    }

    /// Keeps the parts for another connection; nothing may be in progress.
    fn keep(self) {
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }

    fn new(ucx: &Ucx) -> Result<Self> {
        let (params, mut handle, mut wake) = (WorkerParams::serialized(), null_mut(), -1);
        // SAFETY: a live context; the field in the mask is set; there is memory for a handle.
        ucx.check(unsafe { (ucx.call.ucp_worker_create)(ucx.context, &raw const params, &raw mut handle) })?;
        // SAFETY: a live worker, and memory for a descriptor.
        ucx.check(unsafe { (ucx.call.ucp_worker_get_efd)(handle, &raw mut wake) })?;
        Ok(Self { handle, wake, listener: None })
    }

    /// Listens at a free port of an address.
    fn listen(self, ucx: &Ucx, ip: IpAddr) -> Result<Self> {
        let newcomers: &'static Newcomers = Box::leak(Box::default());
        let (address, argument) = (to_c((ip, 0).into()), (&raw const *newcomers).cast_mut().cast());
        let (params, mut handle) = (ListenerParams::at(&address, welcome, argument), null_mut());
        // SAFETY: a live worker; the fields in the mask are set; the address lives through the call, the argument
        // forever.
        ucx.check(unsafe {
            (ucx.call.ucp_listener_create)(self.handle, &raw const params, &raw mut handle)
        })?;
        let mut found = ListenerAttr::address();
        // SAFETY: a live listener, and memory for the result.
        ucx.check(unsafe { (ucx.call.ucp_listener_query)(handle, &raw mut found) })?;
        Ok(Self { listener: Some(Listener { address: from_c(&found.sockaddr)?, newcomers }), ..self })
    }
}
