//! Who may call what: on the socket everything, over TLS what one's certificate is for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ate_identity::{Authority, Role};
use http::{Request, Response};
use tonic::Status;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tower::{Layer, Service};

use crate::permission::{PERMISSIONS, Permission};

/// By what callers are judged.
#[derive(Clone, Debug)]
pub(crate) struct By {
    pub(crate) authority: Arc<Authority>,
    /// Nobody is asked for a person's certificate.
    pub(crate) open: bool,
}

/// `None` where nobody comes but by the socket that the file system protects.
#[derive(Clone, Debug)]
pub(crate) struct GuardLayer(pub(crate) Option<By>);

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;
    fn layer(&self, inner: S) -> Guard<S> {
        Guard { inner, by: self.0.clone() }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Guard<S> {
    inner: S,
    by: Option<By>,
}

impl<S> Guard<S> {
    /// Who speaks: `None` for whoever may use the socket, who may do everything.
    fn role<I>(&self, request: &Request<I>) -> Option<Result<Role, String>> {
        let tls = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>()?;
        let chain = tls.peer_certs().unwrap_or_default();
        let by = self.by.as_ref()?;
        Some(by.authority.role_of(&chain).map_err(|error| error.to_string()))
    }
}

/// Who speaks, for what is written down of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Caller(pub(crate) String);

impl Caller {
    fn of(role: Option<&Result<Role, String>>) -> Self {
        Self(match role {
            None => "socket".to_owned(),
            Some(Ok(role)) => role.to_string(),
            Some(Err(_)) => "no certificate".to_owned(),
        })
    }
}

/// What it takes to be let in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// A certificate of one of these roles.
    Role(&'static [Role]),
    /// A person's certificate, where not everybody is let in.
    Person,
}

impl Needs {
    fn of(permission: Permission) -> Self {
        match permission {
            Permission::Anyone => Self::Nothing,
            Permission::Route => Self::Role(&[Role::Router, Role::Gateway]),
            Permission::Serve => Self::Role(&[Role::Node]),
            Permission::Order => Self::Role(&[]),
            Permission::Read | Permission::Actor | Permission::Administer | Permission::Wipe => Self::Person,
        }
    }

    fn are_met(self, role: Option<Role>, open: bool) -> bool {
        match self {
            Self::Nothing => true,
            Self::Role(roles) => role.is_some_and(|role| roles.contains(&role)),
            Self::Person => open || role == Some(Role::Cli),
        }
    }

    fn refusal(self, call: &str, role: Result<Role, String>) -> Status {
        let caller =
            role.map_or_else(|why| format!("the caller is not ({why})"), |role| format!("the caller is {role}"));
        Status::permission_denied(match self {
            Self::Person => format!(
                "{call} is for people with a certificate of the instance, and {caller}\n  \
                 give --data-dir a directory with the instance's `identity` in it, or use the socket on the server's machine"
            ),
            _ => format!("{call} is for parts of the instance, and {caller}"),
        })
    }
}

impl<S, I, O> Service<Request<I>> for Guard<S>
where
    S: Service<Request<I>, Response = Response<O>>,
    S::Future: Send + 'static,
    S::Error: Send + 'static,
    O: Default + Send + 'static,
{
    type Response = Response<O>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<I>) -> Self::Future {
        let role = self.role(&request);
        request.extensions_mut().insert(Caller::of(role.as_ref()));
        let call = request.uri().path().trim_start_matches('/');
        let permission = PERMISSIONS.iter().find(|(name, _)| *name == call).map(|(_, permission)| *permission);
        let open = self.by.as_ref().is_some_and(|by| by.open);
        if let (Some(needs), Some(role)) = (permission.map(Needs::of), role)
            && !needs.are_met(role.as_ref().ok().copied(), open)
        {
            return Box::pin(std::future::ready(Ok(needs.refusal(call, role).into_http())));
        }
        Box::pin(self.inner.call(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_named_by_the_way_it_came() {
        assert_eq!(Caller::of(None), Caller("socket".to_owned()));
        assert_eq!(Caller::of(Some(&Ok(Role::Cli))), Caller(Role::Cli.to_string()));
        assert_eq!(Caller::of(Some(&Err("it has none".to_owned()))), Caller("no certificate".to_owned()));
    }

    fn opens(permission: Permission, role: Option<Role>, open: bool) -> bool {
        Needs::of(permission).are_met(role, open)
    }

    #[test]
    fn a_part_may_do_its_own_part_only() {
        for open in [true, false] {
            let opens = |permission, role| opens(permission, role, open);
            assert!(opens(Permission::Route, Some(Role::Router)) && !opens(Permission::Route, Some(Role::Node)));
            assert!(opens(Permission::Serve, Some(Role::Node)) && !opens(Permission::Serve, Some(Role::Router)));
            for internal in [Permission::Route, Permission::Serve, Permission::Order] {
                assert!(!opens(internal, None) && !opens(internal, Some(Role::Cli)), "{internal:?}");
            }
        }
    }

    #[test]
    fn where_it_is_not_open_to_everybody_people_show_who_they_are() {
        for permission in [Permission::Read, Permission::Actor, Permission::Administer, Permission::Wipe] {
            assert!(opens(permission, None, true) && !opens(permission, None, false), "{permission:?}");
            assert!(opens(permission, Some(Role::Cli), false), "{permission:?}");
            for part in [Role::Node, Role::Router, Role::Worker] {
                assert!(!opens(permission, Some(part), false), "{part} is no person: {permission:?}");
            }
        }
        assert!(opens(Permission::Anyone, None, false));
    }
}
