//! A worker of UCX at one end of a connection, which one thread has alone.
//!
//! Workers and listeners are kept for later connections, not destroyed: UCX aborts the process where another member
//! connects to what is being destroyed, and members are lost at any time.

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

/// Longest sleep between two looks; what is awaited wakes the thread earlier.
const SLEEP: Duration = Duration::from_millis(500);
/// How long what was given up may take to end.
const LAST_LOOKS: Duration = Duration::from_millis(500);

/// Workers that no connection of this process has now.
static IDLE: Mutex<Vec<Parts>> = Mutex::new(Vec::new());

/// What a worker is made of, and what stays of it.
#[derive(Clone, Copy, Debug)]
struct Parts {
    handle: Handle,
    /// Becomes readable when there is something to be done.
    wake: c_int,
    /// Where other workers connect to this one; none for one that sends.
    listener: Option<Listener>,
}

// SAFETY: one thread has them at a time, as the worker's thread mode allows.
unsafe impl Send for Parts {}

#[derive(Clone, Copy, Debug)]
struct Listener {
    address: SocketAddr,
    newcomers: &'static Newcomers,
}

/// Addresses of the requests of those that have connected, and are no endpoint yet.
type Newcomers = Mutex<Vec<usize>>;

/// A worker, and the one message that it moves at a time.
pub(super) struct Worker {
    ucx: &'static Ucx,
    parts: Parts,
    /// The other side; of a worker that listens, all that have connected.
    endpoints: Vec<Handle>,
    /// What is under way: null where nothing is.
    request: *mut c_void,
    is_receive: bool,
}

// SAFETY: as for its parts.
unsafe impl Send for Worker {}

unsafe extern "C" fn welcome(request: Handle, newcomers: *mut c_void) {
    // SAFETY: the listener's argument, which stays.
    let newcomers = unsafe { &*newcomers.cast::<Newcomers>() };
    newcomers.lock().unwrap_or_else(PoisonError::into_inner).push(request.expose_provenance());
}

/// An endpoint has failed: what is under way on it says the same.
unsafe extern "C" fn ignore(_argument: *mut c_void, _endpoint: Handle, _status: Status) {}

impl Worker {
    /// One that connects to another, and sends.
    pub(super) fn to(ucx: &'static Ucx, address: SocketAddr) -> Result<Self> {
        let parts = Parts::idle(|parts| parts.listener.is_none());
        let mut worker = Self::of(ucx, parts.map_or_else(|| Parts::new(ucx), Ok)?);
        let address = to_c(address);
        worker.connect(&EpParams::to(&address, ignore))?;
        Ok(worker)
    }

    /// One that others connect to at an address of this machine, and that receives.
    pub(super) fn at(ucx: &'static Ucx, ip: IpAddr) -> Result<Self> {
        let is_at = |parts: &Parts| parts.listener.is_some_and(|listener| listener.address.ip() == ip);
        let parts = Parts::idle(is_at).map_or_else(|| Parts::new(ucx)?.listen(ucx, ip), Ok)?;
        Ok(Self::of(ucx, parts))
    }

    fn of(ucx: &'static Ucx, parts: Parts) -> Self {
        Self { ucx, parts, endpoints: Vec::new(), request: null_mut(), is_receive: false }
    }

    /// Where others connect to.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.parts.listener.map(|listener| listener.address)
    }

    /// Makes an endpoint; the address that it names lives through the call.
    fn connect(&mut self, params: &EpParams) -> Result<()> {
        let mut endpoint = null_mut();
        // SAFETY: a live worker; the fields in the mask are set.
        let made = unsafe {
            (self.ucx.call.ucp_ep_create)(self.parts.handle, &raw const *params, &raw mut endpoint)
        };
        self.ucx.check(made)?;
        // None, and no error either, for one that has connected and gone.
        if !endpoint.is_null() {
            self.endpoints.push(endpoint);
        }
        Ok(())
    }

    /// Makes endpoints to those that have connected.
    fn take_in(&mut self) {
        let Some(listener) = self.parts.listener else { return };
        let all = std::mem::take(&mut *listener.newcomers.lock().unwrap_or_else(PoisonError::into_inner));
        for request in all {
            let request = std::ptr::with_exposed_provenance_mut(request);
            // One that has gone meanwhile, or never was this connection's: its sender ends that, if it was.
            let _taken = self.connect(&EpParams::back(request, ignore));
        }
    }

    /// Begins to send to the worker that it is connected to.
    ///
    /// # Safety
    /// The memory stays as it is until `wait` has returned or this is dropped.
    pub(super) unsafe fn send(&mut self, bytes: &[u8], tag: u64) -> Result<()> {
        let (param, nbytes) = (RequestParam::of_host_memory(), bytes.len());
        let endpoint = *self.endpoints.first().ok_or(ErrorKind::NotConnected)?;
        let send = self.ucx.call.ucp_tag_send_nbx;
        // SAFETY: a live endpoint; the bytes live as the caller says.
        let begun = unsafe { send(endpoint, bytes.as_ptr().cast(), nbytes, tag, &raw const param) };
        self.begin(begun, false)
    }

    /// Begins to receive a message.
    ///
    /// # Safety
    /// Nothing else reads or writes the memory until `wait` has returned or this is dropped.
    pub(super) unsafe fn receive(&mut self, room: &mut [u8], tag: u64) -> Result<()> {
        let (param, nbytes) = (RequestParam::of_host_memory(), room.len());
        let (receive, worker) = (self.ucx.call.ucp_tag_recv_nbx, self.parts.handle);
        // SAFETY: a live worker; the memory is this message's as the caller says.
        let begun =
            unsafe { receive(worker, room.as_mut_ptr().cast(), nbytes, tag, u64::MAX, &raw const param) };
        self.begin(begun, true)
    }

    fn begin(&mut self, begun: StatusOrRequest, is_receive: bool) -> Result<()> {
        self.request = self.request_of(begun)?;
        self.is_receive = is_receive;
        Ok(())
    }

    /// The request, null for what is over; or the error.
    fn request_of(&self, begun: StatusOrRequest) -> Result<*mut c_void> {
        let number = begun.addr().cast_signed();
        if (ffi::LAST_ERROR..0).contains(&number) {
            self.ucx.check(Status::try_from(number).unwrap_or(Status::MIN))?;
        }
        Ok(begun)
    }

    /// Waits until what was begun is over; returns the length of a message that came. Fails when UCX does, and when the
    /// connection beside it ends.
    pub(super) fn wait(&mut self, stream: &TcpStream) -> Result<usize> {
        let mut has_ended = false;
        loop {
            while self.progress() {}
            self.take_in();
            if let Some((status, nbytes)) = self.over() {
                self.free();
                return self.ucx.check(status).map(|()| nbytes);
            }
            // What came before the connection's end was looked at once more.
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

    /// Does what is to be done; whether that was anything.
    fn progress(&self) -> bool {
        // SAFETY: a live worker, which this thread has alone.
        unsafe { (self.ucx.call.ucp_worker_progress)(self.parts.handle) != 0 }
    }

    /// How what was begun has ended, and the length of a message that came; none while it is under way.
    fn over(&self) -> Option<(Status, usize)> {
        let mut info = TagInfo::default();
        let call = &self.ucx.call;
        // SAFETY: a request that was not freed, of the kind that the function is for, and room for what it tells.
        let status = unsafe {
            match (self.request.is_null(), self.is_receive) {
                (true, _) => ffi::OK,
                (_, true) => (call.ucp_tag_recv_request_test)(self.request, &raw mut info),
                (_, false) => (call.ucp_request_check_status)(self.request),
            }
        };
        (status != ffi::IN_PROGRESS).then_some((status, info.length))
    }

    /// UCX may use the request again.
    fn free(&mut self) {
        let request = std::mem::replace(&mut self.request, null_mut());
        if !request.is_null() {
            // SAFETY: it was not freed, and is forgotten.
            unsafe { (self.ucx.call.ucp_request_free)(request) };
        }
    }

    /// Sleeps until there is something to be done. Whether the connection has ended.
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

    /// Closes all endpoints without asking the other sides; returns what is to be waited for.
    fn close(&mut self) -> Vec<*mut c_void> {
        let (close, param) = (self.ucx.call.ucp_ep_close_nbx, RequestParam::by_force());
        let mut closing = Vec::new();
        for endpoint in std::mem::take(&mut self.endpoints) {
            // SAFETY: a live endpoint, which is not used afterwards. Of one that cannot be closed nothing is left.
            let begun = self.request_of(unsafe { close(endpoint, &raw const param) });
            closing.extend(begun.ok());
        }
        let param = RequestParam::default();
        // SAFETY: a live worker. It is over once the queues of all closed endpoints are.
        let begun = unsafe { (self.ucx.call.ucp_worker_flush_nbx)(self.parts.handle, &raw const param) };
        closing.extend(self.request_of(begun).ok());
        closing.retain(|request| !request.is_null());
        closing
    }
}

impl Drop for Worker {
    /// Gives up what is under way: when this returns, nothing of it touches memory any more.
    ///
    /// Bytes move in `progress` alone, or by queues of the network, which end with the endpoints. UCX may forget a message
    /// of which some pieces have come: then nobody calls `progress` again. Queues that do not end do so with the worker.
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
            // SAFETY: it was not freed, and is not used any more.
            unsafe { (ucx.call.ucp_request_free)(request) };
        }
        if is_over && is_closed {
            self.parts.keep();
        } else if !is_closed {
            // SAFETY: a live worker, of which nothing is used any more.
            unsafe { (ucx.call.ucp_worker_destroy)(self.parts.handle) };
        }
    }
}

impl Parts {
    /// Those that fit of a worker that no connection has now.
    fn idle(fits: impl Fn(&Self) -> bool) -> Option<Self> {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        let place = idle.iter().position(fits)?;
        Some(idle.swap_remove(place))
    }

    /// Keeps them, while nothing is under way, for another connection.
    fn keep(self) {
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(self);
    }

    fn new(ucx: &Ucx) -> Result<Self> {
        let (params, mut handle, mut wake) = (WorkerParams::serialized(), null_mut(), -1);
        // SAFETY: a live context; the field in the mask is set; room for a handle.
        ucx.check(unsafe { (ucx.call.ucp_worker_create)(ucx.context, &raw const params, &raw mut handle) })?;
        // SAFETY: a live worker, and room for a descriptor.
        ucx.check(unsafe { (ucx.call.ucp_worker_get_efd)(handle, &raw mut wake) })?;
        Ok(Self { handle, wake, listener: None })
    }

    /// Takes connections at a free port of an address.
    fn listen(self, ucx: &Ucx, ip: IpAddr) -> Result<Self> {
        let newcomers: &'static Newcomers = Box::leak(Box::default());
        let (address, argument) = (to_c((ip, 0).into()), (&raw const *newcomers).cast_mut().cast());
        let (params, mut handle) = (ListenerParams::at(&address, welcome, argument), null_mut());
        // SAFETY: a live worker; the fields in the mask are set; the address lives through the call, the argument stays.
        ucx.check(unsafe {
            (ucx.call.ucp_listener_create)(self.handle, &raw const params, &raw mut handle)
        })?;
        let mut found = ListenerAttr::address();
        // SAFETY: a live listener, and room for what is asked for.
        ucx.check(unsafe { (ucx.call.ucp_listener_query)(handle, &raw mut found) })?;
        Ok(Self { listener: Some(Listener { address: from_c(&found.sockaddr)?, newcomers }), ..self })
    }
}
