//! Table of a group's messages in progress, shared by the threads of its connections.

use super::item::Item;
use super::ucx::Ucx;
use super::wire::Request;
use super::{STACK_BYTES, UCX_STACK_BYTES};
use crate::ensure;
use crate::error::Result;
use crate::secret::Secret;
use std::collections::HashMap;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A member's messages with the others of a group.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) group: u64,
    pub(super) rank: usize,
    pub(super) addresses: Vec<String>,
    pub(super) limit: Duration,
    pub(super) secret: Option<Secret>,
    /// Library that moves the bytes of long messages, if all members use it.
    pub(super) ucx: Option<&'static Ucx>,
    state: Mutex<State>,
}

/// Identity of a message: the rank at the other end, its tag, and the number of earlier messages with both.
pub(super) type Key = (usize, u64, u64);

/// Channel that hands a message to the thread that sends it.
pub(super) type Handover = Sender<(Key, Arc<Item>)>;

#[derive(Debug, Default)]
struct State {
    /// Reason why nothing is sent any more, if so.
    ended: Option<String>,
    /// Members whose connections have ended, and the reason.
    lost: HashMap<usize, String>,
    connections: Vec<(usize, Arc<TcpStream>)>,
    /// Number of messages sent to, and expected from, each member with each tag.
    sent: HashMap<(usize, u64), u64>,
    awaited: HashMap<(usize, u64), u64>,
    /// Messages that are ready but not requested.
    offers: HashMap<Key, Arc<Item>>,
    /// Requested messages that are not ready: the size of their memory, and the thread that will send each.
    requests: HashMap<Key, (u64, Handover)>,
    /// Messages that this member has requested.
    expected: HashMap<Key, Arc<Item>>,
    /// Transfers that are held by a caller.
    held: HashMap<u64, Arc<Item>>,
    transfers: u64,
}

impl Table {
    pub(super) fn new(
        group: u64,
        rank: usize,
        addresses: Vec<String>,
        limit: Duration,
        (secret, ucx): (Option<Secret>, Option<&'static Ucx>),
    ) -> Arc<Self> {
        Arc::new(Self { group, rank, addresses, limit, secret, ucx, state: Mutex::default() })
    }

    /// Stack size of a thread that sends or receives.
    pub(super) fn stack_bytes(&self) -> usize {
        if self.ucx.is_some() { UCX_STACK_BYTES } else { STACK_BYTES }
    }

    /// Adds a message that is ready to be sent; returns the number of its transfer.
    pub(super) fn offer(&self, item: Arc<Item>, tag: u64) -> u64 {
        let mut state = self.lock();
        let transfer = Self::hold(&mut state, &item);
        let peer = item.peer;
        let number = next(&mut state.sent, (peer, tag));
        match state.requests.remove(&(peer, tag, number)) {
            Some((room, thread)) => self.dispatch(state, (peer, tag, number), item, room, &thread),
            None => {
                state.offers.insert((peer, tag, number), item);
            }
        }
        transfer
    }

    /// Adds memory for a message of a member; returns the number of its transfer, and the request to send.
    pub(super) fn expect(&self, item: Arc<Item>, tag: u64) -> (u64, Request) {
        let mut state = self.lock();
        let transfer = Self::hold(&mut state, &item);
        let number = next(&mut state.awaited, (item.peer, tag));
        let room = item.nbytes() as u64;
        state.expected.insert((item.peer, tag, number), item);
        (transfer, Request { tag, number, room })
    }

    /// Creates one end of a message.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a rank that is not one of the others.
    pub(super) fn item(&self, address: *mut u8, nbytes: usize, peer: usize) -> Result<Arc<Item>> {
        let (rank, size) = (self.rank, self.addresses.len());
        ensure!(
            peer < size && peer != rank,
            "peer: expected a rank below {size} that is not {rank}, got {peer}"
        );
        Ok(Item::new(peer, address, nbytes))
    }

    /// Returns the number of a new transfer, which fails if its member is lost already.
    fn hold(state: &mut State, item: &Arc<Item>) -> u64 {
        if let Some(reason) = state.ended.as_ref().or_else(|| state.lost.get(&item.peer)) {
            item.fail(reason);
        }
        state.transfers += 1;
        state.held.insert(state.transfers, item.clone());
        state.transfers
    }

    /// Releases a transfer that no caller holds any more.
    pub(super) fn forget(&self, number: u64) {
        self.lock().held.remove(&number);
    }

    /// Handles a request: `thread` sends the message once it is ready.
    pub(super) fn requested(&self, peer: usize, request: Request, thread: &Handover) {
        let key = (peer, request.tag, request.number);
        let mut state = self.lock();
        match state.offers.remove(&key) {
            Some(item) => self.dispatch(state, key, item, request.room, thread),
            None => {
                state.requests.insert(key, (request.room, thread.clone()));
            }
        }
    }

    fn dispatch(
        &self,
        state: MutexGuard<'_, State>,
        key: Key,
        item: Arc<Item>,
        room: u64,
        thread: &Handover,
    ) {
        drop(state);
        let nbytes = item.nbytes() as u64;
        if nbytes > room {
            let (peer, tag, _) = key;
            self.lose(
                peer,
                &format!("a message of {nbytes} bytes with tag {tag}: rank {peer} expects at most {room}"),
            );
        } else if thread.send((key, item)).is_err() {
            self.lose(key.0, "the connection has ended");
        }
    }

    /// Takes the memory for a message that arrives.
    pub(super) fn take_expected(&self, key: Key) -> Option<Arc<Item>> {
        self.lock().expected.remove(&key)
    }

    /// Keeps a connection, so that `end` can shut it down; returns whether it is still wanted.
    pub(super) fn keep(&self, peer: usize, connection: &Arc<TcpStream>) -> bool {
        let mut state = self.lock();
        let is_wanted = state.ended.is_none() && !state.lost.contains_key(&peer);
        if is_wanted {
            state.connections.push((peer, connection.clone()));
        }
        is_wanted
    }

    /// Handles the end of a member's connections: nothing arrives from it or is sent to it any more.
    pub(super) fn lose(&self, peer: usize, reason: &str) {
        let mut state = self.lock();
        let reason = format!("rank {peer}: {reason}");
        let reason = state.lost.entry(peer).or_insert(reason).clone();
        self.shut(state, &reason, |each| each == peer);
    }

    pub(super) fn end(&self, reason: &str) {
        let mut state = self.lock();
        let reason = state.ended.get_or_insert_with(|| reason.to_owned()).clone();
        self.shut(state, &reason, |_| true);
    }

    fn shut(&self, mut state: MutexGuard<'_, State>, reason: &str, is_meant: impl Fn(usize) -> bool) {
        let all = std::mem::take(&mut state.connections);
        let (meant, others) = all.into_iter().partition(|&(peer, _)| is_meant(peer));
        state.connections = others;
        state.offers.retain(|&(peer, ..), _| !is_meant(peer));
        state.expected.retain(|&(peer, ..), _| !is_meant(peer));
        // This also ends the sending threads, which wait for messages to send.
        state.requests.retain(|&(peer, ..), _| !is_meant(peer));
        let waiting: Vec<Arc<Item>> =
            state.held.values().filter(|item| is_meant(item.peer)).cloned().collect();
        drop(state);
        let meant: Vec<(usize, Arc<TcpStream>)> = meant;
        for (_, connection) in meant {
            // An error means that the other side has closed it already.
            let _closed = connection.shutdown(Shutdown::Both);
        }
        for item in waiting {
            item.fail(reason);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The next number: one more than the previous.
fn next(counts: &mut HashMap<(usize, u64), u64>, of: (usize, u64)) -> u64 {
    let count = counts.entry(of).or_default();
    *count += 1;
    *count - 1
}
